"""Ray Serve accepts the Serve configurations of the manifests.

`tests/system/test_serve_demo.py` runs one.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import yaml
from ray.serve.schema import ServeDeploySchema

from cluster.serving.ray_serve.options import read_arguments
from tests.deploy.serve_demo import MIDDLEWARES, environment_of

if TYPE_CHECKING:
    from tests.deploy.kustomize import Manifest


def test_ray_serve_and_the_application_accept_the_configuration(ray_service: Manifest) -> None:
    config = ServeDeploySchema.model_validate(yaml.safe_load(ray_service["spec"]["serveConfigV2"]))
    [application] = config.applications
    assert application.import_path == "pagedray:build_app"
    arguments = read_arguments(application.args)
    # The mount path of the Secret.
    assert arguments.serve.api_keys == "/etc/pagedray/keys.toml"


def test_the_callbacks_of_the_proxies_exist(ray_service: Manifest) -> None:
    config = yaml.safe_load(ray_service["spec"]["serveConfigV2"])
    for path in config["grpc_options"]["grpc_servicer_functions"]:
        module, _, name = path.rpartition(".")
        assert callable(getattr(import_module(module), name))
    cluster = ray_service["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        [container] = group["template"]["spec"]["containers"]
        module, _, name = environment_of(container)[MIDDLEWARES].partition(":")
        assert callable(getattr(import_module(module), name))
