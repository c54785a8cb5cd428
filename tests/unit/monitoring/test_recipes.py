"""Test that the dashboard and the alert rules ask for metrics and labels that /metrics has."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from checkpointless.observability.monitoring.metrics import Metrics
from checkpointless.observability.report.summary import build_report
from tests.unit.made_up_run import MadeUpRun
from tests.unit.monitoring.test_pages import SNAPSHOT

FOLDER = Path(__file__).parents[3] / "recipes" / "monitoring"
DASHBOARD = json.loads((FOLDER / "grafana.json").read_text())
RULES = [rule for part in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"] for rule in part["rules"]]
TARGETS = [
    (f"{panel['title']} {target['refId']}", target) for panel in DASHBOARD["panels"] for target in panel["targets"]
]
EXPRESSIONS = {name: target["expr"] for name, target in TARGETS} | {rule["alert"]: rule["expr"] for rule in RULES}


def served() -> Mapping[str, dict[str, set[str]]]:
    run = MadeUpRun()
    run.start()
    run.incident(31.0, "1", committed=21, resumed=15)
    report = build_report("/runs/one", run.events)
    page = Metrics(0, "train", "/runs/one", "train.py").page(SNAPSHOT, report).decode()
    found: dict[str, dict[str, set[str]]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
    return found


SERVED = served()


def selectors(expression: str) -> Iterator[tuple[str, list[Any]]]:
    found: list[tuple[str, list[Any]]] = []
    labels: list[str] = []

    def visit(expr: Any) -> None:
        selector = getattr(expr, "vector_selector", expr)
        if isinstance(selector, promql_parser.VectorSelector):
            found.append((str(selector.name), list(selector.matchers.matchers)))
        if isinstance(expr, promql_parser.AggregateExpr) and expr.modifier is not None:
            labels.extend(expr.modifier.labels)

    promql_parser.walk(promql_parser.parse(expression), pre_visit=visit)
    known = {"le"}.union(*(SERVED.get(name, {}) for name, _ in found))
    assert set(labels) <= known, expression
    yield from found


@pytest.mark.parametrize("expression", EXPRESSIONS.values(), ids=EXPRESSIONS)
def test_what_is_asked_for_is_served(expression: str) -> None:
    asked = list(selectors(expression))
    assert asked
    for name, matchers in asked:
        assert name in SERVED
        for matcher in matchers:
            if matcher.value != "$run":
                assert matcher.value in SERVED[name][matcher.name], f"{name}: {matcher.name}={matcher.value}"
            assert matcher.name in SERVED[name]


def test_the_dashboard_asks_for_what_it_shows() -> None:
    variables = {each["name"]: each for each in DASHBOARD["templating"]["list"]}
    name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variables["run"]["query"]["query"]).groups()  # type: ignore[union-attr]
    assert label in SERVED[name]
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(numbers)) == len(numbers) >= 10
    for title, target in TARGETS:
        shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert all(f"by ({label}" in target["expr"] or f", {label}" in target["expr"] for label in shown), title
        assert 'run=~"$run"' in target["expr"], title


def test_the_words_of_an_alert_name_labels_that_it_has() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES) >= 5
    for rule in RULES:
        words = " ".join(rule["annotations"].values())
        by = set(re.split(r", ?", ",".join(re.findall(r"by \(([^)]*)\)", rule["expr"]))))
        assert set(re.findall(r"\$labels\.(\w+)", words)) <= by, rule["alert"]
        assert rule["labels"]["severity"] in ("critical", "warning")


def test_prometheus_is_told_of_the_rules_and_to_keep_our_labels() -> None:
    config = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
    assert all((FOLDER / name).is_file() for name in config["rule_files"])
    (scraped,) = config["scrape_configs"]
    assert scraped["honor_labels"] is True
