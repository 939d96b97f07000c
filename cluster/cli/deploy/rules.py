"""Rules between values of the chart that are valid on their own: sizes, cores, hosts, upgrades."""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING

from cluster.engine.options.engine_options import check_options
from cluster.serving.ray_serve.options import read_arguments
from pagedray.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.cli.deploy.values import Values

__all__ = ["rule_errors"]

_MAX_NAME_LENGTH = 47
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_GIB = 2**30
_OBJECT_STORE_BYTES = 512 * 2**20
_GRACE_MARGIN_S = 60
_CLAIM_MARGIN = 1.05
"""Space for the tokenizer, and for the file system itself."""
_DISK_FOLDER = "/var/cache/pagedray"
_DISK_NEEDS = {"enable_prefix_cache": False, "enable_cpu_prefix_cache": False, "num_cpu_blocks": 0}
"""The arguments that the disk cache needs, and the values that leave nothing for it."""
_SIZES: dict[str, int] = {
    **{unit: 1000**power for power, unit in enumerate(["", "k", "M", "G", "T"])},
    **{unit: 1024**power for power, unit in enumerate(["Ki", "Mi", "Gi", "Ti"], start=1)},
}


def rule_errors(values: Values, *, release: str, weight_bytes: int | None) -> Iterator[str]:
    """Yield a line for each rule that values break, which match the schema of the chart."""
    if len(release) > _MAX_NAME_LENGTH or not _NAME.fullmatch(release):
        yield (
            f"--release: {release!r:.80} must be at most {_MAX_NAME_LENGTH} lowercase letters, "
            "digits and dashes, and begin with a letter."
        )
    yield from _hosts(values)
    yield from _worker(values)
    yield from _storage(values, weight_bytes)
    yield from _disk_cache(values)
    yield from _upgrade(values)
    yield from _addresses(values)
    yield from _arguments(values)


def _hosts(values: Values) -> Iterator[str]:
    ranks, gpus = values["tensorParallelSize"], values["gpusPerHost"]
    if gpus and max(ranks, gpus) % min(ranks, gpus):
        yield (
            f"tensorParallelSize: {ranks} ranks do not fill hosts of {gpus} GPUs (gpusPerHost); "
            "one must be a multiple of the other."
        )
    grace, drain = values["graceSeconds"], values["drainSeconds"]
    if 0 < grace < drain + _GRACE_MARGIN_S:
        yield (
            f"graceSeconds: {grace} would end a pod within drainSeconds, {drain}, and a minute for "
            f"Ray; use at least {drain + _GRACE_MARGIN_S}, or a shorter drainSeconds."
        )
    if 0 < values["maxReplicas"] < values["replicas"]:
        yield "maxReplicas: it must be 0, for a fixed number, or at least replicas."


def _worker(values: Values) -> Iterator[str]:
    ranks, gpus, worker = values["tensorParallelSize"], values["gpusPerHost"], values["worker"]
    ranks_per_host = gpus or ranks
    needed = ranks_per_host + max(ranks_per_host // ranks, 1)
    if _cores(worker["cpu"]) < needed:
        yield (
            f"worker.cpu: {worker['cpu']} is not enough; a host needs a core for each of its ranks "
            f'({ranks_per_host}) and replicas, "{needed}".'
        )
    shared = worker["sharedMemory"] or _default_shared_memory(ranks)
    shown = worker["sharedMemory"] or f"{shared} (its default)"
    needed_bytes = _OBJECT_STORE_BYTES + (ranks_per_host * _GIB if gpus and ranks > 1 else 0)
    if _bytes(shared) < needed_bytes:
        gib = -(-needed_bytes // _GIB)
        yield (
            f"worker.sharedMemory: {shown} is not enough; Ray's object store and the "
            f"ranks of a host ({ranks_per_host}) need {gib}Gi."
        )
    if _bytes(shared) >= _bytes(worker["memory"]):
        yield (
            f"worker.sharedMemory: {shown} must be less than worker.memory, "
            f"{worker['memory']}, which it counts against."
        )


def _storage(values: Values, weight_bytes: int | None) -> Iterator[str]:
    storage, model = values["storage"], values["model"]
    is_downloaded = not model.startswith("/")
    if storage["image"]:
        yield from _image_volume(storage, model)
        return
    if model == "/models":
        yield "model: write a folder below /models, such as /models/Llama-3.1-8B-Instruct."
    if is_downloaded and storage["accessMode"] == "ReadOnlyMany":
        yield (
            "storage.accessMode: a model cannot be downloaded into a ReadOnlyMany claim; use "
            "ReadWriteMany, or a folder under /models that is in the claim."
        )
    if storage["existingClaim"] and storage["storageClassName"]:
        yield (
            "storage.storageClassName: it is for a claim that the chart creates, and "
            "storage.existingClaim names another; remove one."
        )
    uses_claim = is_downloaded or model.startswith("/models/")
    for name in ("existingClaim", "subPath"):
        if storage[name] and not uses_claim and model != "/models":
            yield (
                f"storage.{name}: nothing would use it, as the model {model} is in the image of "
                "the container; write a folder below /models, or remove it."
            )
    if uses_claim and storage["accessMode"] == "ReadWriteOnce" and _num_workers(values) > 1:
        yield (
            "storage.accessMode: ReadWriteOnce is for pods of one host; use ReadWriteMany for "
            f"{_num_workers(values)} workers."
        )
    needed = None if weight_bytes is None else int(_CLAIM_MARGIN * weight_bytes)
    if uses_claim and not storage["existingClaim"] and needed and needed > _bytes(storage["size"]):
        yield (
            f"storage.size: {storage['size']} is not enough; the weights have "
            f"{(weight_bytes or 0) / _GIB:.1f} GiB, use {-(-needed // _GIB)}Gi."
        )


def _image_volume(storage: Values, model: str) -> Iterator[str]:
    if storage["existingClaim"]:
        yield (
            "storage.image: the model has two sources, an image and storage.existingClaim; remove "
            "one."
        )
    if storage["subPath"]:
        yield (
            "storage.subPath: it is a folder of a claim; of storage.image, write the folder as "
            "model, such as /models/FOLDER."
        )
    if not model.startswith("/"):
        yield (
            f"model: {model} would be downloaded, but storage.image has the model; write the "
            "folder of the image, such as /models, or remove storage.image."
        )
    elif model != "/models" and not model.startswith("/models/"):
        yield (
            f"model: {model} is not in storage.image, which is at /models; write /models or a "
            "folder below."
        )


def _disk_cache(values: Values) -> Iterator[str]:
    disk = values["diskCache"]
    if not disk["size"]:
        if disk["storageClassName"]:
            yield (
                "diskCache.storageClassName: there is no disk without diskCache.size; set it, or "
                "remove this."
            )
        return
    ranks_per_host = values["gpusPerHost"] or values["tensorParallelSize"]
    if _bytes(disk["size"]) < ranks_per_host * _GIB:
        yield (
            f"diskCache.size: {disk['size']} is not enough for the {ranks_per_host} ranks of a "
            f"host, which each have a file there; use at least {ranks_per_host}Gi."
        )
    for name, off in _DISK_NEEDS.items():
        # 0 and False are equal.
        if (given := values["arguments"].get(name)) == off and type(given) is type(off):
            yield (
                f"arguments.{name}: with {str(off).lower()}, nothing would be written to the disk "
                "of diskCache.size; remove one."
            )


def _upgrade(values: Values) -> Iterator[str]:
    gcs = values["gcs"]
    if gcs["faultTolerance"] == "rocksdb" and not gcs["rocksdb"]["featureGateEnabled"]:
        yield (
            "gcs.faultTolerance: rocksdb needs KubeRay's feature gate "
            "GCSFaultToleranceEmbeddedStorage; enable it in the operator and set "
            "gcs.rocksdb.featureGateEnabled: true."
        )
    if values["gateway"]["enabled"] and not values["gateway"]["name"]:
        yield "gateway.name: it is required with gateway.enabled."
    if values["gateway"]["inferencePool"]["enabled"] and not values["gateway"]["enabled"]:
        yield (
            "gateway.inferencePool.enabled: it needs gateway.enabled: true, whose route leads to "
            "the pool."
        )
    if values["upgrade"]["strategy"] != "NewClusterWithIncrementalUpgrade":
        return
    if not values["maxReplicas"]:
        yield "upgrade.strategy: an incremental upgrade needs the autoscaler; set maxReplicas."
    if values["gateway"]["enabled"]:
        yield (
            "upgrade.strategy: an incremental upgrade replaces the service that the routes use, "
            "and has none for gRPC; use NewCluster, or gateway.enabled: false."
        )
    incremental = values["upgrade"]["incremental"]
    if not incremental["gatewayClassName"]:
        yield "upgrade.incremental.gatewayClassName: an incremental upgrade needs a GatewayClass."
    step, surge = incremental["stepSizePercent"], incremental["maxSurgePercent"]
    if step > surge:
        yield (
            f"upgrade.incremental.stepSizePercent: KubeRay rejects {step}, which is more than "
            f"maxSurgePercent, {surge}."
        )


def _addresses(values: Values) -> Iterator[str]:
    for part, name in (("download", "cidrs"), ("autoscaler", "apiServerCidrs")):
        for number, block in enumerate(values[part][name]):
            try:
                ipaddress.ip_network(block)
            except ValueError as error:
                reason = str(error).replace("'", "")
                yield f"{part}.{name}.{number}: {reason}; write a block such as 10.0.0.0/8."


def _arguments(values: Values) -> Iterator[str]:
    given = {
        # A folder is not looked for, as a Hub id would be checked.
        "model": values["model"].replace("s3://", "/models/s3/", 1),
        "device": "cuda" if values["gpusPerHost"] else "cpu",
        "tensor_parallel_size": values["tensorParallelSize"],
        "num_replicas": values["replicas"],
        **values["arguments"],
    }
    if (size := values["diskCache"]["size"]) and not any(_disk_cache(values)):
        given |= {"disk_cache_folder": _DISK_FOLDER, "disk_cache_bytes": _bytes(size)}
    try:
        check_options(read_arguments(given).engine)
    except StartupError as error:
        # Errors about an argument begin with its name.
        name = str(error).partition(" ")[0]
        path = f"arguments.{name}" if name in values["arguments"] else "arguments"
        yield f"{path}: {error}"


def _num_workers(values: Values) -> int:
    replicas: int = max(values["replicas"], values["maxReplicas"])
    num_ranks: int = values["tensorParallelSize"]
    gpus: int = values["gpusPerHost"]
    return -(-replicas * num_ranks // gpus) if gpus else replicas


def _default_shared_memory(ranks: int) -> str:
    """Return the shared memory that the chart gives a worker."""
    return "32Gi" if ranks > 1 else "1Gi"


def _cores(text: str) -> float:
    return int(text[:-1]) / 1000 if text.endswith("m") else int(text)


def _bytes(text: str) -> int:
    unit = text.lstrip("0123456789")
    return int(text.removesuffix(unit)) * _SIZES[unit]
