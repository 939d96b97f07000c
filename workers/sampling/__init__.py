"""The parts of the sampler, one noun a file; `workers.sampler` puts them together."""

__all__: list[str] = []
