"""A worker whose steps end at once, and whose block copies end when the test says so."""

from pagedray.batch import StepMasks, StepOutput, StepPlan


class CopyingStep:
    """A step with copies under way."""

    needs_masks = False
    is_ready = True

    def __init__(self, step: int) -> None:
        self.step = step
        self.is_copied = False

    def take_masks(self, masks: StepMasks) -> None:
        raise AssertionError

    def output(self) -> StepOutput:
        return StepOutput(self.step, [], is_acknowledged=self.is_copied)


class CopyingWorker:
    """Launches `CopyingStep`s."""

    def __init__(self) -> None:
        self.steps: list[CopyingStep] = []

    def launch(self, plan: StepPlan) -> CopyingStep:
        self.steps.append(CopyingStep(plan.step))
        return self.steps[-1]

    def use_idle_time(self) -> bool:
        """Return that nothing is left to do."""
        return False

    def end_copies(self) -> None:
        """End all copies so far."""
        for step in self.steps:
            step.is_copied = True

    def close(self) -> None:
        """Do nothing, as there is nothing to release."""
