"""The panel as static HTML: one string, no script, nothing fetched.

It is what the notebook shows while the cluster runs and what stays in the saved file. Where the host strips the
``<style>`` (GitHub, an untrusted notebook), a plain table and the sentence remain. Colours are the notebook's own where
it names them; the fallbacks follow the light or dark scheme of the page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from html import escape
from typing import NamedTuple

from tfos_nb.state import ClusterState, ClusterStatus, NodeState, NodeStatus
from tfos_nb.widgets import wording

__all__ = ["render_html"]

FEW_NODES = 12
"""Up to so many nodes have a row each; of more, a cell each, and a row for the ones to look at."""

SHOWN_OF_MANY = 5

_STYLE = """<style>
.tfos-panel{--f-bg:#fff;--f-ink:#1c2024;--f-dim:#646c76;--f-run:#2f6fde;--f-ok:#1a7f4b;--f-warn:#b26a00;--f-bad:#c0352b}
@media (prefers-color-scheme:dark){.tfos-panel{--f-bg:#171b20;--f-ink:#e8ebee;--f-dim:#98a2ad;--f-run:#6ea8ff;\
--f-ok:#4cc38a;--f-warn:#f0a63c;--f-bad:#ff7b70}}
.tfos-panel{--t-bg:var(--jp-layout-color1,var(--vscode-editor-background,var(--f-bg)));
--t-ink:var(--jp-content-font-color1,var(--vscode-editor-foreground,var(--f-ink)));
--t-dim:var(--jp-content-font-color2,var(--vscode-descriptionForeground,var(--f-dim)));
--t-run:var(--jp-brand-color1,var(--vscode-charts-blue,var(--f-run)));
--t-ok:var(--jp-success-color1,var(--vscode-charts-green,var(--f-ok)));
--t-warn:var(--jp-warn-color1,var(--vscode-charts-orange,var(--f-warn)));
--t-bad:var(--jp-error-color1,var(--vscode-charts-red,var(--f-bad)));
--t-line:color-mix(in srgb,var(--t-dim) 26%,var(--t-bg));--t-soft:color-mix(in srgb,var(--t-dim) 8%,var(--t-bg));
--t-track:color-mix(in srgb,var(--t-dim) 20%,var(--t-bg));
max-width:1060px;margin:2px 0;border:1px solid var(--t-line);border-radius:10px;overflow:hidden;background:var(--t-bg);
color:var(--t-ink);font:13px/1.45 var(--jp-ui-font-family,system-ui,-apple-system,"Segoe UI",Roboto,sans-serif);
font-variant-numeric:tabular-nums}
.tfos-panel,.tfos-panel *{box-sizing:border-box}
.tfos-panel .t-ok{--c:var(--t-ok)}.tfos-panel .t-run{--c:var(--t-run)}.tfos-panel .t-warn{--c:var(--t-warn)}
.tfos-panel .t-bad{--c:var(--t-bad)}.tfos-panel .t-idle{--c:var(--t-dim)}
.tfos-panel .t-head{display:flex;flex-wrap:wrap;align-items:center;gap:4px 10px;padding:10px 14px}
.tfos-panel .t-name{font-size:14px;font-weight:650}.tfos-panel .t-dim{color:var(--t-dim)}
.tfos-panel .t-end{margin-left:auto}
.tfos-panel .t-pill{display:inline-flex;align-items:center;gap:6px;padding:1px 9px;border:1px solid var(--t-line);
border-radius:99px;background:var(--t-soft);font-size:12px;white-space:nowrap}
.tfos-panel .t-pill::before{content:"";width:8px;height:8px;border-radius:50%;background:var(--c)}
.tfos-panel .t-say{padding:8px 14px;border-top:1px solid var(--t-line);background:var(--t-soft);overflow-wrap:anywhere}
.tfos-panel .t-say.t-bad{background:color-mix(in srgb,var(--t-bad) 9%,var(--t-bg))}
.tfos-panel .t-say.t-warn{background:color-mix(in srgb,var(--t-warn) 9%,var(--t-bg))}
.tfos-panel details{margin-top:4px}
.tfos-panel summary{cursor:pointer;font-size:12px;color:var(--t-dim)}
.tfos-panel pre.t-trace{margin:6px 0 2px;padding:8px 10px;max-height:320px;overflow:auto;border-radius:6px;
border:1px solid var(--t-line);background:var(--t-bg);color:var(--t-ink);
font:12px/1.45 var(--jp-code-font-family,ui-monospace,SFMono-Regular,Menlo,Consolas,monospace)}
.tfos-panel .t-sum{display:flex;flex-wrap:wrap;border-top:1px solid var(--t-line);gap:1px;background:var(--t-line)}
.tfos-panel .t-tile{flex:1 1 104px;padding:9px 14px 10px;min-width:0;background:var(--t-bg)}
.tfos-panel .t-wide{flex-grow:1.6}
.tfos-panel .t-tile b{display:block;font-size:16px;font-weight:600;white-space:nowrap}
.tfos-panel .t-label{font-size:11px;letter-spacing:.02em;color:var(--t-dim);white-space:nowrap;display:block;
overflow:hidden;text-overflow:ellipsis}
.tfos-panel .t-track{height:4px;margin-top:5px;border-radius:2px;overflow:hidden;background:var(--t-track)}
.tfos-panel .t-track div{height:100%;border-radius:2px;background:var(--c)}
.tfos-panel .t-grid{display:grid;grid-template-columns:repeat(16,1fr);gap:4px;padding:12px 14px;
border-top:1px solid var(--t-line)}
.tfos-panel .t-cell{height:20px;border-radius:4px;font-size:11px;line-height:20px;text-align:center;font-weight:650;
color:var(--t-bg);background:color-mix(in srgb,var(--c) 75%,var(--t-track))}
.tfos-panel .t-cell.t-idle{background:var(--t-track)}
.tfos-panel.tfos-panel table.t-nodes{width:100%;margin:0;table-layout:fixed;border-collapse:collapse;border:0;
border-top:1px solid var(--t-line);font-size:13px;color:inherit;background:none}
.tfos-panel.tfos-panel .t-nodes caption{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
.tfos-panel.tfos-panel .t-nodes thead{border:0;vertical-align:middle}
.tfos-panel.tfos-panel .t-nodes tr,.tfos-panel.tfos-panel .t-nodes tr:hover{background:none!important}
.tfos-panel.tfos-panel .t-nodes :is(th,td){padding:6px 8px;border:0;border-top:1px solid var(--t-line);max-width:none;
text-align:left;vertical-align:middle;white-space:nowrap;overflow:hidden;text-overflow:ellipsis}
.tfos-panel.tfos-panel .t-nodes thead th{border-top:0;font-size:11px;font-weight:500;color:var(--t-dim)}
.tfos-panel.tfos-panel .t-nodes tbody th{font-weight:600}
.tfos-panel.tfos-panel .t-nodes :is(th,td):first-child{padding-left:14px}
.tfos-panel.tfos-panel .t-nodes :is(th,td):last-child{padding-right:14px}
.tfos-panel.tfos-panel .t-nodes .t-num{text-align:right}
.tfos-panel .t-mono{font-family:var(--jp-code-font-family,ui-monospace,SFMono-Regular,Menlo,Consolas,monospace);
font-size:12px;color:var(--t-dim)}
.tfos-panel .t-foot{padding:7px 14px;border-top:1px solid var(--t-line);font-size:12px;color:var(--t-dim);
overflow-wrap:anywhere}
</style>"""


class _Column(NamedTuple):
    title: str
    share: int
    css: str
    cell: Callable[[NodeState, str], str]


def render_html(state: ClusterState, *, note: str = "", left: float | None = None, every_node: bool = False) -> str:
    """Draw a cluster as a self-contained piece of HTML.

    Parameters
    ----------
    state : ClusterState
        What to draw.
    note : str
        One more line at the end.
    left : float, optional
        Seconds until the training ends, if somebody measured its pace.
    every_node : bool
        Show a row for each node, however many there are.

    Returns
    -------
    str
        HTML; every text in it that came from outside is escaped.
    """
    parts = [
        f'<section class="tfos-panel" aria-label="TensorFlow cluster {escape(state.name)}">',
        _head(state),
        _say(state),
        _summary(state, left),
        _grid(state),
        _table(state, every_node),
        f'<div class="t-foot">{escape(note)}</div>' if note else "",
        "</section>",
    ]
    return _STYLE + "".join(parts)


def _head(state: ClusterState) -> str:
    elapsed = "" if state.status is ClusterStatus.PLANNED else wording.duration(state.elapsed)
    end = " · ".join(part for part in (state.spark_master, elapsed) if part)
    return (
        f'<div class="t-head"><b class="t-name">{escape(state.name)}</b> '
        f'<span class="t-pill t-{wording.tone(state)}">{escape(wording.cluster_word(state))}</span> '
        f'<span class="t-dim">{escape(wording.size(state))}</span> '
        f'<span class="t-dim t-end">{escape(end)}</span></div>'
    )


def _say(state: ClusterState) -> str:
    """Write the sentence, and under it the rest of an error, folded."""
    first, rest = wording.headline(state.error)
    failed = state.status is ClusterStatus.FAILED
    troubled = any(wrong for _, wrong in wording.trouble_first(state.nodes))
    warn = state.status is ClusterStatus.RECOVERING or (troubled and not state.status.ended)
    said = escape(wording.sentence(state))
    if failed and first:
        node, colon, cause = said.partition(": ")
        said = f"<b>{node}</b>{colon}{cause}" if colon else f"<b>{said}</b>"
        stopped = sum(node.status is NodeStatus.STOPPED for node in state.nodes)
        others = f"{stopped} other node{'s were' if stopped > 1 else ' was'} stopped because of it. " if stopped else ""
        said += f'<div class="t-dim">{others}The Spark session is free: fix the cell and run it again.</div>'
    elif first and not state.status.ended and state.status is not ClusterStatus.RECOVERING:
        said += f"<div>{escape(first)}</div>"
    if rest:
        said += f'<details><summary>traceback</summary><pre class="t-trace">{escape(rest)}</pre></details>'
    return f'<div class="t-say {"t-bad" if failed else "t-warn" if warn else ""}">{said}</div>'


def _summary(state: ClusterState, left: float | None) -> str:
    """Draw the tiles: how far, how good, how fast, how long still."""
    if state.status in (ClusterStatus.PLANNED, ClusterStatus.STARTING):
        return ""
    total = wording.progress(state)
    tiles = [_epoch_tile(total, wording.tone(state)), _feed_tile(state)]
    metrics = [(name, value) for name, value in total.metrics if name != "loss"]
    loss = dict(total.metrics).get("loss")
    tiles.append(_tile("Loss", wording.number(loss)))
    if metrics:
        name = metrics[0][0].replace("_", " ")
        tiles.append(_tile(name[:1].upper() + name[1:], wording.number(metrics[0][1])))
    if state.status.ended:
        tiles.append(_tile("Took", wording.duration(state.elapsed)))
    else:
        tiles.append(_tile("Rows/s", wording.rate(total.rows_per_second)))
        tiles.append(_tile("Left", "" if left is None else f"~ {wording.duration(left)}"))
    return f'<div class="t-sum">{"".join(tiles)}</div>'


def _tile(label: str, value: str, bar: str = "", wide: bool = False) -> str:
    return (
        f'<div class="t-tile{" t-wide" if wide else ""}"><span class="t-label">{escape(label)}</span> '
        f"<b>{escape(value) or '—'}</b>{bar}</div>"
    )


def _epoch_tile(total: wording.Progress, tone: str) -> str:
    if total.epoch is None:
        return _tile("Epoch", "", _bar(0, "idle", "epoch"), wide=True)
    of = f" of {total.epochs}" if total.epochs else ""
    value = f"{total.share:.0%}" if total.share is not None else f"step {total.step}" if total.step is not None else ""
    value = value.replace("%", " %")
    return _tile(f"Epoch {total.epoch}{of}", value, _bar(total.share, tone, "epoch"), wide=True)


def _feed_tile(state: ClusterState) -> str:
    feed = state.feed
    if feed is None:
        return ""
    passes = f" · {feed.epochs} passes" if feed.epochs > 1 else ""
    share = feed.partitions_done / feed.partitions if feed.partitions else None
    done = "" if share is None else f" · {share:.0%}".replace("%", " %")
    return _tile(f"Feed{passes}{done}", f"{wording.count(feed.rows)} rows", _bar(share, "ok", "feed"), wide=True)


def _bar(share: float | None, tone: str, of_what: str) -> str:
    """Draw a thin bar; without a share, its empty track, so that nothing moves when a share comes."""
    if share is None:
        return '<div class="t-track"></div>'
    percent = round(100 * min(1.0, max(0.0, share)))
    return (
        f'<div class="t-track t-{tone}" role="progressbar" aria-label="{of_what}" aria-valuemin="0" '
        f'aria-valuemax="100" aria-valuenow="{percent}"><div style="width:{percent}%"></div></div>'
    )


def _grid(state: ClusterState) -> str:
    """Draw a cell for each of many nodes; what is wrong with one has a sign beside its colour."""
    if len(state.nodes) <= FEW_NODES or state.status is ClusterStatus.PLANNED:
        return ""
    wrong = {node.node: said for node, said in wording.trouble_first(state.nodes) if said}
    cells, words = [], []
    for node in state.nodes:
        word = wrong.get(node.node) or wording.node_word(node)
        tone = "warn" if node.node in wrong else wording.tone(node)
        sign = {"bad": "✕", "warn": "!" if node.node in wrong else ""}.get(tone, "")
        words.append(word.partition(" ")[0])
        cells.append(f'<span class="t-cell t-{tone}" title="{escape(f"{node.node} {word}")}">{sign}</span>')
    told = ", ".join(f"{n} {word}" for word, n in Counter(words).most_common())
    label = escape(f"{len(state.nodes)} nodes: {told}")
    return f'<div class="t-grid" role="img" aria-label="{label}">{"".join(cells)}</div>'


def _table(state: ClusterState, every_node: bool) -> str:
    judged = wording.trouble_first(state.nodes)
    many = len(state.nodes) > FEW_NODES and not every_node
    if many:
        judged = judged[:SHOWN_OF_MANY]
    else:
        wrong = {node.node: said for node, said in judged}
        judged = [(node, wrong[node.node]) for node in state.nodes]
    columns = _PLAN_COLUMNS if state.status is ClusterStatus.PLANNED else _COLUMNS
    widths = "".join(f'<col style="width:{column.share}%">' for column in columns)
    titles = "".join(f'<th scope="col" class="{column.css}">{column.title}</th>' for column in columns)
    rows = "".join(_row(columns, node, wrong) for node, wrong in judged)
    told = f"the {len(judged)} furthest behind of {len(state.nodes)} nodes" if many else "the nodes"
    foot = f'<div class="t-foot">{told}</div>' if many else ""
    return (
        f'<table class="t-nodes"><caption>{escape(state.name)}: {told}</caption><colgroup>{widths}</colgroup>'
        f"<thead><tr>{titles}</tr></thead><tbody>{rows}</tbody></table>{foot}"
    )


def _row(columns: tuple[_Column, ...], node: NodeState, wrong: str) -> str:
    cells = "".join(f'<td class="{column.css}">{column.cell(node, wrong)}</td>' for column in columns[1:])
    return f'<tr><th scope="row">{escape(node.node)}</th>{cells}</tr>'


def _where(node: NodeState, _: str) -> str:
    where = escape(" · ".join(part for part in (node.host, node.executor) if part))
    return f'<span class="t-mono" title="{where}">{where}</span>'


def _state(node: NodeState, wrong: str) -> str:
    tone = "warn" if wrong else wording.tone(node)
    return f'<span class="t-pill t-{tone}">{escape(wrong or wording.node_word(node))}</span>'


def _step(node: NodeState, wrong: str) -> str:
    """Write the step with its bar; for a node without steps or one that ended badly, what is known of it."""
    tone = "warn" if wrong else wording.tone(node)
    share = (node.step or 0) / node.steps if node.steps else None
    if node.detail and (node.step is None or tone == "bad"):
        detail = escape(node.detail)
        return f'<span class="t-dim" title="{detail}">{detail}</span>{_bar(share, tone, "steps")}'
    text = "" if node.step is None else f"{node.step} / {node.steps}" if node.steps else str(node.step)
    return (text or "—") + _bar(share, tone, f"steps of {escape(node.node)}")


def _epoch(node: NodeState, _: str) -> str:
    if node.epoch is None:
        return ""
    return f"{node.epoch} / {node.epochs}" if node.epochs else str(node.epoch)


def _machine(node: NodeState, _: str) -> str:
    cpu = "" if node.cpu_percent is None else f"{node.cpu_percent:.0f}%"
    gpus = f"GPU {', '.join(node.gpus)}" if node.gpus else ""
    return escape(" · ".join(part for part in (gpus, cpu, wording.memory(node.memory_bytes)) if part))


_NODE = _Column("Node", 12, "", lambda node, _: escape(node.node))
_COLUMNS = (
    _NODE,
    _Column("Host · executor", 19, "", _where),
    _Column("State", 13, "", _state),
    _Column("Epoch", 8, "", _epoch),
    _Column("Step", 16, "", _step),
    _Column("Loss", 8, "t-num", lambda node, _: wording.number(node.loss)),
    _Column("Rows/s", 8, "t-num", lambda node, _: wording.rate(node.rows_per_second)),
    _Column("CPU · memory", 16, "t-num", _machine),
)
_PLAN_COLUMNS = (_NODE, _Column("Slot", 88, "", lambda node, _: escape(node.detail or "—")))
