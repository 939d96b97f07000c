"""`pagedray deploy`: checks Helm values, and downloads a model or waits until it is there.

A Job of the Helm chart downloads into a volume, and each pod waits until it can be read. An
interrupted download is continued, and files count as missing until they are verified.
"""

from __future__ import annotations

import json
import logging
import shlex
import time
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING, Any

import jsonschema
import yaml

from cluster.engine.engine_options import check_options
from cluster.serving.ray_serve.options import read_arguments
from pagedray.errors import CheckpointError, StartupError
from workers.hub.fetch import fetch_files, find_revision, side_files
from workers.hub.locate import gguf_file, gguf_shards, listed_weight_files
from workers.hub.mirror import S3_SCHEME, Mirror, parse_location
from workers.hub.model_name import HubName, parse_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from workers.hub.model_name import HubSettings

__all__ = ["check", "fetch", "fetch_command", "wait_for_mirror", "wait_for_model"]

logger = logging.getLogger(__name__)

_POLL_S = 5.0
_EXAMPLE = "registry.example.com/"
"""No registry: the default of the chart, which users replace."""
_GIB = 2**30
_OBJECT_STORE_BYTES = 512 * 2**20
_DISK_FOLDER = "/var/cache/pagedray"
_SIZES: dict[str, int] = {
    **{unit: 1000**power for power, unit in enumerate(["", "k", "M", "G", "T"])},
    **{unit: 1024**power for power, unit in enumerate(["Ki", "Mi", "Gi", "Ti"], start=1)},
}

# Any: YAML.
Values = dict[str, Any]


def fetch_command(model: str, *, folder: Path | None, is_waiting: bool) -> int:
    """Print the folder of a model after its download, or when another process is done with it.

    Raises PagedRayError.
    """
    from cluster.serving.telemetry.log_lines import logging_to
    from workers.hub.model_name import HubSettings

    is_in_s3 = model.startswith(S3_SCHEME)
    if is_in_s3 and folder is None:
        raise StartupError("A model on S3 requires --folder, the folder to download it to.")
    if not is_in_s3 and folder is not None:
        raise StartupError(
            "--folder is for models on S3; HF_HOME sets the folder of models from the Hub."
        )
    with logging_to(form="text", level="info"):
        if folder is not None:
            # A name that is wrong would be waited for without end.
            parse_location(model)
            found = wait_for_mirror(folder) if is_waiting else fetch_from_s3(model, folder)
        else:
            run = wait_for_model if is_waiting else fetch
            found = run(model, HubSettings.from_environment())
        print(found)
    return 0


def fetch(model: str, settings: HubSettings) -> Path:
    """Return the folder of a complete model, or its GGUF file. Raises CheckpointError."""
    return _fetch(_hub_name(model), settings)


def fetch_from_s3(model: str, folder: Path) -> Path:
    """Return the folder after downloading a model of S3 into it. Raises CheckpointError."""
    location = parse_location(model)
    try:
        # An optional dependency.
        from workers.hub.bucket import Bucket, fetch_folder
    except ImportError as error:
        raise CheckpointError(
            "Downloads from S3 require the package obstore: pip install 'pagedray[s3]'."
        ) from error
    return fetch_folder(location, folder, Bucket(location))


def wait_for_model(model: str, settings: HubSettings, poll_s: float = _POLL_S) -> Path:
    """Return the folder of a model as soon as another process has downloaded all of it.

    Raises CheckpointError if it is not the name of a model on the Hub.
    """
    name = _hub_name(model)
    offline = replace(settings, is_offline=True)

    def look() -> Path | str:
        try:
            return _fetch(name, offline)
        except CheckpointError as error:
            return str(error)

    return _wait(look, poll_s)


def wait_for_mirror(folder: Path, poll_s: float = _POLL_S) -> Path:
    """Return the folder as soon as another process has downloaded a model of S3 into it."""

    def look() -> Path | str:
        problem = Mirror(folder).problem()
        return folder if problem is None else problem

    return _wait(look, poll_s)


def _wait(look: Callable[[], Path | str], poll_s: float) -> Path:
    """Return the folder that `look` finds; until then, `look` returns the missing part."""
    last = ""
    while True:
        found = look()
        if not isinstance(found, str):
            return found
        # Once for each reason, not for each look.
        if found != last:
            logger.info("Waiting: %s", found)
        last = found
        time.sleep(poll_s)


def _hub_name(model: str) -> HubName:
    name = parse_model(model)
    if not isinstance(name, HubName):
        raise CheckpointError(f"{model!r:.200} is a folder; only models on the Hub are downloaded.")
    return name


def _fetch(name: HubName, settings: HubSettings) -> Path:
    hub = find_revision(name, settings)
    gguf = gguf_file(hub, name.quant)
    if gguf is not None:
        return fetch_files(hub, gguf_shards(hub, gguf), settings=settings) / gguf
    folder = fetch_files(hub, side_files(hub), settings=settings)
    fetch_files(hub, listed_weight_files(hub, folder), settings=settings)
    return folder


def check(paths: Sequence[Path], *, chart: Path) -> int:
    """Print a line for each error in Helm values, and return 1 after any.

    Files are merged as by Helm: later files win. The chart itself rejects further combinations of
    values when Helm renders it. Raises StartupError.
    """
    if not chart.is_dir():
        raise StartupError(
            f"There is no chart {chart}; run this in a checkout of PagedRay, or use --chart."
        )
    values = reduce(_merged, map(_read_values, paths), _read_values(chart / "values.yaml"))
    schema = json.loads((chart / "values.schema.json").read_text())
    names = ", ".join(map(str, paths))
    errors = sorted(
        f"{'.'.join(map(str, error.absolute_path))}: {error.message:.300}"
        for error in jsonschema.Draft7Validator(schema).iter_errors(values)
    )
    # The rules rely on the types of the schema.
    errors = errors or [*_worker_errors(values), *_argument_errors(values)]
    for error in errors:
        print(f"{names}: {error}")
    if errors:
        return 1
    print(f"{names}: no errors found. To deploy:")
    command = ["helm", "install", "pagedray", str(chart)]
    for path in paths:
        command += ["--values", str(path)]
    if values["image"]["repository"].startswith(_EXAMPLE):
        command += ["--set", "image.repository=REGISTRY/pagedray"]
    print(f"\n    {shlex.join(command)}")
    return 0


def _read_values(path: Path) -> Values:
    try:
        found = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise StartupError(f"Cannot read {path}: {reason}.") from error
    # A date may be out of range, and an integer too long.
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise StartupError(f"{path} is not valid YAML: {reason:.200}.") from error
    if not isinstance(found, dict):
        raise StartupError(f"{path} must have lines such as `model: Qwen/Qwen3-8B`.")
    return found


def _merged(defaults: Values, given: Values) -> Values:
    """Return the values as Helm merges them: mappings by key, everything else as a whole."""
    merged = dict(defaults)
    for name, value in given.items():
        default = merged.get(name)
        if isinstance(value, dict) and isinstance(default, dict):
            merged[name] = _merged(default, value)
        elif value is None and name in merged:
            # Null removes a default.
            del merged[name]
        else:
            merged[name] = value
    return merged


def _worker_errors(values: Values) -> Iterator[str]:
    """Yield an error for each resource of a worker that its ranks do not fit into."""
    ranks, gpus, worker = values["tensorParallelSize"], values["gpusPerHost"], values["worker"]
    ranks_per_host = gpus or ranks
    needed = ranks_per_host + max(ranks_per_host // ranks, 1)
    if _cores(worker["cpu"]) < needed:
        yield (
            f"worker.cpu: {worker['cpu']} is not enough; a host needs a core for each of its ranks "
            f'({ranks_per_host}) and replicas, "{needed}".'
        )
    # The default of the chart.
    shared = worker["sharedMemory"] or ("32Gi" if ranks > 1 else "1Gi")
    shown = worker["sharedMemory"] or f"{shared} (its default)"
    needed_bytes = _OBJECT_STORE_BYTES + (ranks_per_host * _GIB if gpus and ranks > 1 else 0)
    if _bytes(shared) < needed_bytes:
        yield (
            f"worker.sharedMemory: {shown} is not enough; Ray's object store and the "
            f"ranks of a host ({ranks_per_host}) need {-(-needed_bytes // _GIB)}Gi."
        )
    if _bytes(shared) >= _bytes(worker["memory"]):
        yield (
            f"worker.sharedMemory: {shown} must be less than worker.memory, "
            f"{worker['memory']}, which it counts against."
        )
    replicas = max(values["replicas"], values["maxReplicas"])
    num_workers = -(-replicas * ranks // gpus) if gpus else replicas
    uses_claim = not values["storage"]["image"] and not (
        values["model"].startswith("/") and not values["model"].startswith("/models/")
    )
    if uses_claim and values["storage"]["accessMode"] == "ReadWriteOnce" and num_workers > 1:
        yield (
            "storage.accessMode: ReadWriteOnce is for pods of one host; use ReadWriteMany for "
            f"{num_workers} workers."
        )


def _argument_errors(values: Values) -> Iterator[str]:
    """Yield the error of the application's arguments, if any."""
    given = {
        # A folder is not looked for, as a Hub id would be checked.
        "model": values["model"].replace("s3://", "/models/s3/", 1),
        "device": "cuda" if values["gpusPerHost"] else "cpu",
        "tensor_parallel_size": values["tensorParallelSize"],
        "num_replicas": values["replicas"],
        **values["arguments"],
    }
    if size := values["diskCache"]["size"]:
        given |= {"disk_cache_folder": _DISK_FOLDER, "disk_cache_bytes": _bytes(size)}
    try:
        check_options(read_arguments(given).engine)
    except StartupError as error:
        # The message begins with the argument's name, if it is about one argument.
        name = str(error).partition(" ")[0]
        path = f"arguments.{name}" if name in values["arguments"] else "arguments"
        yield f"{path}: {error}"


def _cores(text: str) -> float:
    return int(text[:-1]) / 1000 if text.endswith("m") else int(text)


def _bytes(text: str) -> int:
    unit = text.lstrip("0123456789")
    return int(text.removesuffix(unit)) * _SIZES[unit]
