"""The dashboard as Grafana reads it, by the types that Grafana publishes for it."""

import json
from collections.abc import Callable, Iterator
from typing import Any

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    prometheus,
    stat,
    statetimeline,
    timeseries,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as options
from grafana_foundation_sdk.models import dashboard as model

from proxy.metrics import PREFIX
from tests.documents.dashboard.condition import ANNOTATIONS
from tests.documents.dashboard.model import Annotation, Kind, Panel, Query, Row
from tests.documents.dashboard.rows import ROWS

UID = "llama-prefix-cache"
DATASOURCE = model.DataSourceRef("prometheus", "${datasource}")
WIDTH = 24
SCHEMA_VERSION = 41
"""That of Grafana 11.6 and 12; what changed since the types' own 36 is not used here."""
Built = stat.Panel | bargauge.Panel | statetimeline.Panel | timeseries.Panel


def dashboard_file() -> str:
    """Return the dashboard as JSON."""
    built = (
        dashboard.Dashboard("llama-prefix-cache")
        .uid(UID)
        .description("Did it hit, what did it save, and if not, why not?")
        .tags(["llama.cpp", "llama-prefix-cache"])
        .time("now-6h", "now")
        .refresh("30s")
        .timezone("browser")
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .variables(list(_variables()))
        .annotations([_annotation(annotation) for annotation in ANNOTATIONS])
        .build()
    )
    built.schema_version = SCHEMA_VERSION
    built.panels = list(_placed(ROWS))
    return json.dumps(built, cls=JSONEncoder, indent=1, ensure_ascii=False) + "\n"


def _variables() -> Iterator[Any]:
    yield dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
    yield _chosen("model", "Model", f"label_values({PREFIX}_served_models, model)").all_value(".*")
    # All of them means those that serve the chosen models, so that it has no value of its own. A proxy that
    # has not served any model yet has only its version, which `.*` finds.
    named = f'__name__=~"{PREFIX}_(served_models|build_info)"'
    yield _chosen("instance", "Proxy", f'label_values({{{named},model=~"$model"}}, instance)')


def _chosen(name: str, label: str, query: str) -> dashboard.QueryVariable:
    """Return a variable of which some values can be chosen, or all."""
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(DATASOURCE)
        .query({"query": query, "refId": name})
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .current(model.VariableOption(selected=True, text="All", value="$__all"))
    )


def _annotation(annotation: Annotation) -> dashboard.AnnotationQuery:
    return (
        dashboard.AnnotationQuery()
        .name(annotation.name)
        .datasource(DATASOURCE)
        .expr(annotation.expr)
        .icon_color(annotation.color)
    )


def _placed(rows: tuple[Row, ...]) -> Iterator[model.Panel | model.RowPanel]:
    """Return all panels with ids and places: from left to right, a row of the grid when one is full."""
    top, next_id = 0, 1
    for row in rows:
        heading = model.RowPanel(row.is_folded, row.title, id_val=next_id)
        heading.grid_pos = model.GridPos(h=1, w=WIDTH, x=0, y=top)
        heading.panels = []
        if row.title:
            yield heading
            top, next_id = top + 1, next_id + 1
        left = height = 0
        for panel in row.panels:
            if left + panel.width > WIDTH:
                left, top = 0, top + height
            built = _panel(panel).id(next_id).build()
            built.grid_pos = model.GridPos(h=panel.height, w=panel.width, x=left, y=top)
            left, height, next_id = left + panel.width, panel.height, next_id + 1
            if row.is_folded:
                heading.panels.append(built)
            else:
                yield built
        top += 0 if row.is_folded else height  # the next heading follows a folded one


def _panel(panel: Panel) -> Built:
    built = _FORMS[panel.kind]()
    built.title(panel.title).description(panel.says).datasource(DATASOURCE).unit(panel.unit)
    built.targets([_target(panel, i, query) for i, query in enumerate(panel.queries)])
    built.thresholds(_thresholds(panel))
    if panel.if_empty:
        built.no_value(panel.if_empty).mappings([_not_a_number(panel.if_empty)])
    if panel.unit == "percentunit":
        built.min(0)
    if panel.maximum is not None:
        built.max(panel.maximum)
    for name, color in panel.colors.items():
        given = [model.DynamicConfigValue("color", {"mode": "fixed", "fixedColor": color})]
        if name in panel.apart:
            given.append(model.DynamicConfigValue("custom.axisPlacement", "right"))
            given.append(model.DynamicConfigValue("custom.axisLabel", name))
        built.override_by_name(name, given)
    return built


def _target(panel: Panel, number: int, query: Query) -> prometheus.Dataquery:
    target = prometheus.Dataquery().expr(query.expr).legend_format(query.legend or panel.title)
    target.ref_id(chr(ord("A") + number)).datasource(DATASOURCE)
    return target.instant() if panel.kind.is_instant else target.range()


def _thresholds(panel: Panel) -> dashboard.ThresholdsConfig:
    steps = [model.Threshold(value, color) for value, color in panel.steps or ((None, "green"),)]
    return dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(steps)


def _not_a_number(text: str) -> model.SpecialValueMap:
    """Return the words for 0/0, which is what a share of nothing is."""
    result = model.ValueMappingResult(text=text, color="text")
    return model.SpecialValueMap(
        model.DashboardSpecialValueMapOptions(model.SpecialValueMatch.NULL_AND_NAN, result)
    )


def _last_value() -> common.ReduceDataOptions:
    return common.ReduceDataOptions().calcs(["lastNotNull"])


def _palette() -> dashboard.FieldColor:
    return dashboard.FieldColor().mode(model.FieldColorModeId.PALETTE_CLASSIC_BY_NAME)


def _values() -> stat.Panel:
    return (
        stat.Panel()
        .reduce_options(_last_value())
        .graph_mode(options.BigValueGraphMode.NONE)
        .color_mode(options.BigValueColorMode.VALUE)
    )


def _names() -> stat.Panel:
    return _values().text_mode(options.BigValueTextMode.NAME)


def _ranked() -> bargauge.Panel:
    return (
        bargauge.Panel()
        .reduce_options(_last_value())
        .orientation(options.VizOrientation.HORIZONTAL)
        .display_mode(options.BarGaugeDisplayMode.BASIC)
        .show_unfilled(False)
        .color_scheme(_palette())
        .min(0)
    )


def _timeline() -> statetimeline.Panel:
    return (
        statetimeline.Panel()
        .show_value(options.VisibilityMode.NEVER)
        .merge_values(True)
        .legend(common.VizLegendOptions().show_legend(False))
        .color_scheme(dashboard.FieldColor().mode(model.FieldColorModeId.FIXED).fixed_color("red"))
    )


def _lines() -> timeseries.Panel:
    legend = common.VizLegendOptions().display_mode(options.LegendDisplayMode.LIST)
    tooltip = common.VizTooltipOptions().mode(options.TooltipDisplayMode.MULTI)
    return (
        timeseries.Panel()
        .legend(legend.placement(options.LegendPlacement.BOTTOM).show_legend(True))
        .tooltip(tooltip.sort(options.SortOrder.DESCENDING))
        .color_scheme(_palette())
        .line_width(2)
        .fill_opacity(5)
        .show_points(options.VisibilityMode.AUTO)
        .axis_soft_min(0)
    )


def _stacked() -> timeseries.Panel:
    stacking = common.StackingConfig().mode(options.StackingMode.NORMAL).group("A")
    return _lines().stacking(stacking).line_width(1).fill_opacity(60)


_FORMS: dict[Kind, Callable[[], Built]] = {
    Kind.VALUES: _values,
    Kind.NAMES: _names,
    Kind.RANKED: _ranked,
    Kind.LINES: _lines,
    Kind.STACKED: _stacked,
    Kind.TIMELINE: _timeline,
}
