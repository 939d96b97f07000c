"""The parts of the sampler, which `workers.sampler` puts together."""

__all__: list[str] = []
