"""A kernel that Triton cannot compile."""

__all__ = ["FailingKernel"]


class FailingKernel:
    """Fails when it is launched, as compilers do."""

    __name__ = "failing"

    def __getitem__(self, grid: tuple[int, ...]) -> None:
        raise RuntimeError("PassManager::run failed")
