"""The dashboard and the alert rules query only metrics that servers export."""

from __future__ import annotations

import json
import re
import subprocess
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.kustomize import needs_tool, tool

DASHBOARD = Path("deploy/grafana/pagedray.json")
RULES = Path("deploy/prometheus")
DOCUMENT = Path("docs/observability.md")
SCALERS = Path("deploy/single-pod/components")
SUFFIXES = ("_bucket", "_sum", "_count")

with_promtool = needs_tool("promtool")


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return found


def dashboard_queries() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel.get("targets", ())]


def rule_queries() -> list[str]:
    groups = yaml.safe_load((RULES / "alerts.yaml").read_text())["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


def scaler_queries() -> list[str]:
    """Return what KEDA asks Prometheus, and the metrics of the HorizontalPodAutoscaler."""
    objects = yaml.safe_load_all((SCALERS / "keda" / "scaledobject.yaml").read_text())
    [scaled] = [one for one in objects if one["kind"] == "ScaledObject"]
    triggers = [one for one in scaled["spec"]["triggers"] if one["type"] == "prometheus"]
    scaler = yaml.safe_load((SCALERS / "hpa" / "autoscaler.yaml").read_text())
    metrics = [one["pods"]["metric"] for one in scaler["spec"]["metrics"]]
    return [
        *(one["metadata"]["query"] for one in triggers),
        *(_series(one["name"], one.get("selector", {}).get("matchLabels", {})) for one in metrics),
    ]


def _series(name: str, labels: dict[str, str]) -> str:
    pairs = ",".join(f'{label}="{value}"' for label, value in labels.items())
    return f"{name}{{{pairs}}}"


def documented() -> dict[str, tuple[str, set[str]]]:
    """Return kind and labels of each metric; another test compares them with a server's."""
    rows = re.findall(r"^\| `([\w:]+)` \| (\w+) \|([^|]*)\|", DOCUMENT.read_text(), re.MULTILINE)
    return {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}


@pytest.mark.parametrize("query", [*dashboard_queries(), *rule_queries(), *scaler_queries()])
def test_queries_use_exported_metrics(query: str) -> None:
    metrics = documented()
    named = re.findall(r"\b((?:pagedray_|vllm:)\w+)(?:\{([^}]*)\})?", query)
    assert named
    for sample, selector in named:
        name = next(
            (sample.removesuffix(s) for s in SUFFIXES if sample.removesuffix(s) in metrics), sample
        )
        kind, labels = metrics[name]
        assert (kind == "histogram") == (sample != name), f"{sample} is of a {kind}"
        used = set(re.findall(r"(\w+)\s*[=!]", selector))
        assert used <= labels | {"le", "instance"}, f"{name} has no label {used - labels}"
        # Only the rate of a counter is meaningful.
        if kind != "gauge":
            assert re.search(rf"(rate|increase)\({sample}\b", query)


def test_the_endpoint_picker_is_given_exported_metrics() -> None:
    flags = re.findall(
        r"^ *--[\w-]+-metric=ray_(\w+)(?:\{(\w+)=\w+\})?$",
        Path("docs/kubernetes.md").read_text(),
        re.MULTILINE,
    )
    assert len(flags) == 3
    for name, label in flags:
        kind, labels = documented()[name]
        assert kind == "gauge"
        assert not label or label in labels


def test_panels_are_complete_and_do_not_overlap() -> None:
    assert len({panel["id"] for panel in panels()}) == len(panels())
    places = [panel["gridPos"] for panel in panels()]
    for place in places:
        assert 0 <= place["x"] <= 24 - place["w"]
    for one, other in combinations(places, 2):
        is_beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        is_below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert is_beside or is_below
    for panel in panels():
        assert panel["title"]
        if panel["type"] == "row":
            continue
        assert panel["type"] in ("timeseries", "stat", "heatmap")
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        ids = [target["refId"] for target in panel["targets"]]
        assert len(set(ids)) == len(ids) > 0
        assert "unit" in panel["fieldConfig"]["defaults"] or panel["type"] == "heatmap"


def test_variables_of_the_dashboard_are_declared() -> None:
    text = DASHBOARD.read_text()
    declared = {one["name"] for one in json.loads(text)["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", text)) - {"__all", "__rate_interval"}
    assert used == declared


def test_every_metric_is_on_the_dashboard() -> None:
    ours = {name for name in documented() if name.startswith("pagedray_")}
    text = DASHBOARD.read_text()
    assert {name for name in ours if name not in text} == set()


def test_every_alert_has_a_description() -> None:
    for group in yaml.safe_load((RULES / "alerts.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert set(rule["annotations"]) == {"summary", "description"}
    tests = (RULES / "alerts_test.yaml").read_text()
    names = re.findall(r"alert: (\w+)", (RULES / "alerts.yaml").read_text())
    assert {name for name in names if f"alertname: {name}\n" not in tests} == set()


def promtool(*arguments: str | Path) -> None:
    done = subprocess.run(
        [tool("promtool"), *arguments], capture_output=True, text=True, check=False, cwd=RULES
    )
    assert done.returncode == 0, done.stdout + done.stderr


@with_promtool
def test_alert_rules_fire_as_expected() -> None:
    promtool("check", "config", "--lint=all", "--lint-fatal", "prometheus.yaml")
    promtool("check", "rules", "--lint=all", "--lint-fatal", "alerts.yaml")
    promtool("test", "rules", "alerts_test.yaml")


@with_promtool
def test_queries_of_the_dashboard_are_promql(tmp_path: Path) -> None:
    queries = [
        query.replace("$__rate_interval", "5m").replace("$instance", ".*")
        for query in (*dashboard_queries(), *scaler_queries())
    ]
    rules = [{"record": f"panel:{number}", "expr": q} for number, q in enumerate(queries)]
    file = tmp_path / "queries.yaml"
    # JSON is valid YAML.
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", "--lint=none", file)
