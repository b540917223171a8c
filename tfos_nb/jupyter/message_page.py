"""Page that says in a sentence why there is nothing to show. It has no script and loads no other files."""

from __future__ import annotations

from html import escape

__all__ = ["page"]

_STYLE = (
    ":root{color-scheme:light dark}body{margin:0;min-height:90vh;display:grid;place-items:center;"
    'font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}main{max-width:36rem;padding:2rem}'
    "h1{font-size:1.2rem;margin:0 0 .4rem}p{margin:0;white-space:pre-wrap;overflow-wrap:anywhere}"
)


def page(title: str, text: str, again: int | None = None) -> str:
    """Return the page's HTML. Both texts are escaped.

    Parameters
    ----------
    title, text : str
        What happened, and what to do.
    again : int, optional
        Seconds after which the browser reloads the page automatically.
    """
    refresh = f'<meta http-equiv="refresh" content="{again}">' if again is not None else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{refresh}<title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><main><h1>{escape(title)}</h1><p>{escape(text)}</p></main></body></html>"
    )
