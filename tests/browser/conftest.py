"""A real JupyterLab at a base URL, and a real browser that is logged in to it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import nbformat
import pytest

from tests.conftest import ENVIRONMENT
from tests.jupyter_server import TOKEN, an_unused_port, await_answer
from tests.widgets.browser import chromium
from tfos_nb.spark.java import find_java

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Locator, Page, Response

BASE = "/user/alice/"
SECONDS = 90
# Messages of JupyterLab itself and of the browser.
NOT_OURS = re.compile(
    r"favicon|third-party cookie|\[Deprecation\]|was preloaded using link preload|GPU stall|Slow network is detected"
    r"|api/me|Permissions policy violation|ResizeObserver|news|extensionmanager"
)

LOAD = """
%load_ext tfos_nb
import os
from tfos_nb import spark_session
spark = spark_session(4, conf={"spark.ui.enabled": "false"})
rows = spark.createDataFrame([([float(i % 7), 1.0], float(i % 7)) for i in range(256)], "x array<float>, y float")
"""

FIT = """
def main(args, ctx):
    import keras, tensorflow as tf, time
    class Slowly(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            time.sleep({pause})
    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"])
    print("main has begun on", ctx.job_name, ctx.task_index, flush=True)
    model.fit(ctx.dataset(16, x="x", y="y"), epochs={epochs}, callbacks=[Slowly()], shuffle=False, verbose=0)
    return "came to its end"
"""


def fit(pause: float = 0.02, epochs: int = 4) -> str:
    """Return a program that fits slowly enough to be watched."""
    return FIT.format(pause=pause, epochs=epochs)


class Lab:
    """A JupyterLab of one test module, in a separate folder."""

    extensions: ClassVar[dict[str, bool]] = {"tfos_nb.serverext": True, "jupyterlab": True}

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = an_unused_port()
        self.url = f"http://127.0.0.1:{self.port}{BASE}"
        self.work = folder / "work"
        self.work.mkdir()
        own = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
        self.environment = {
            **ENVIRONMENT,
            **{name: str(folder / name) for name in own},
            "JAVA_HOME": str(find_java().home),
            "TFOS_NB_PROGRESS": "auto",
        }
        self.log = folder / "log"
        self._output = self.log.open("wb")
        self._server = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        settings = {
            "ServerApp.port": self.port,
            "ServerApp.ip": "127.0.0.1",
            "ServerApp.base_url": BASE,
            "ServerApp.root_dir": self.work,
            "ServerApp.jpserver_extensions": str(self.extensions),
            "IdentityProvider.token": TOKEN,
            "LabApp.expose_app_in_browser": True,
            "LabApp.news_url": "",
        }
        command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"]
        command += [f"--{name}={value}" for name, value in settings.items()]
        server = subprocess.Popen(
            command, env=self.environment, stdout=self._output, stderr=self._output, start_new_session=True
        )
        await_answer(self.url + "api", server, self.log)
        return server

    def close(self) -> None:
        """End the server, its kernels and their Spark."""
        self._server.send_signal(signal.SIGTERM)
        try:
            self._server.wait(30)
        finally:
            with contextlib.suppress(ProcessLookupError):  # no process of it is left
                os.killpg(self._server.pid, signal.SIGKILL)
            self._output.close()

    def write(self, name: str, *cells: str) -> None:
        """Write a notebook of these cells."""
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell.strip()) for cell in cells])
        notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        nbformat.write(notebook, self.work / name)

    def saved(self, name: str) -> list[Any]:
        """Return the outputs of a notebook's file, cell by cell."""
        return [cell.outputs for cell in nbformat.read(self.work / name, as_version=4).cells]


class Tab:
    """A browser page with a notebook; it records errors of the page."""

    def __init__(self, context: BrowserContext, lab: Lab) -> None:
        self.lab = lab
        self.kernel_ends = False
        self.page: Page = context.new_page()
        self.complaints: list[str] = []
        self.failed: list[str] = []
        self.asked: list[str] = []
        self.page.set_default_timeout(SECONDS * 1000)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", self._listen)
        self.page.on("response", self._answered)

    def _listen(self, message: Any) -> None:
        text = f"{message.text} {message.location.get('url', '')}"
        if message.type == "error" and not NOT_OURS.search(text) and not self._true_of_tensorboard(text):
            self.complaints.append(text)

    def _true_of_tensorboard(self, text: str) -> bool:
        """Whether it is an expected error of TensorBoard: it is not up yet, or its kernel is shut down."""
        answers = ["503", "502", "410"] if self.kernel_ends else ["503"]
        return "/tfos-nb/tb/" in text and any(f"status of {answer}" in text for answer in answers)

    def _answered(self, response: Response) -> None:
        if "tfos-nb" in response.url:
            self.asked.append(response.url)
            if response.status >= 400:
                self.failed.append(f"{response.status} {response.url}")

    def open(self, name: str) -> Tab:
        """Open a notebook alone, without tabs that other tests left open."""
        self.page.goto(f"{self.lab.url}lab/workspaces/{name.partition('.')[0]}/tree/{name}?reset")
        self.page.wait_for_function("window.jupyterapp !== undefined")
        self.page.evaluate("jupyterapp.restored")
        self.page.locator(".jp-Notebook .jp-CodeCell").first.wait_for()
        self._await_kernel()
        return self

    def _await_kernel(self) -> None:
        self.page.wait_for_function(
            "['idle', 'busy'].includes(jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel?.status)"
        )

    def command(self, name: str) -> None:
        """Start a command of JupyterLab, and do not wait for its end."""
        self.page.evaluate("name => { jupyterapp.commands.execute(name) }", name)

    def run_all(self) -> Tab:
        """Run every cell."""
        self.command("notebook:run-all-cells")
        return self

    def reload(self) -> None:
        """Reload the page, as a user does by F5."""
        self.page.reload()
        self.page.wait_for_function("window.jupyterapp !== undefined")
        self.page.evaluate("jupyterapp.restored")
        self.page.locator(".jp-Notebook .jp-CodeCell").first.wait_for()

    def save(self) -> None:
        """Save the notebook, and wait until it is saved."""
        self.page.evaluate("jupyterapp.commands.execute('docmanager:save')")

    @property
    def panel(self) -> Locator:
        """The newest cluster's live panel or its snapshot."""
        return self.page.locator(".tfos-panel").last

    def until_idle(self) -> None:
        """Wait until the kernel has run all cells."""
        self.page.wait_for_function(
            "jupyterapp.shell.currentWidget.sessionContext.session?.kernel?.status === 'idle' &&"
            "![...document.querySelectorAll('.jp-InputPrompt')].some(prompt => prompt.textContent.includes('*'))"
        )

    def output(self, number: int) -> str:
        """Return a cell's output as text."""
        return self.page.locator(".jp-CodeCell").nth(number).locator(".jp-OutputArea").inner_text()


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        from playwright.sync_api import expect

        expect.set_options(timeout=SECONDS * 1000)
        yield running


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    running = Lab(tmp_path_factory.mktemp("lab"))
    yield running
    running.close()


@pytest.fixture
def context(browser: Browser, lab: Lab) -> Iterator[BrowserContext]:
    """A browser that is logged in."""
    made = browser.new_context(viewport={"width": 1360, "height": 1000})
    made.request.get(f"{lab.url}tree?token={TOKEN}")
    yield made
    made.close()


@pytest.fixture
def open_tab(request: pytest.FixtureRequest, context: BrowserContext, lab: Lab) -> Iterator[Callable[..., Tab]]:
    """Write a notebook and open it; at the end shut down its kernel, and check that the page had no errors."""
    tabs: list[Tab] = []

    def open_it(name: str, *cells: str) -> Tab:
        if cells:
            lab.write(name, *cells)
        tabs.append(Tab(context, lab).open(name))
        return tabs[-1]

    yield open_it
    for number, tab in enumerate(tabs):  # a picture to look at after a failed test
        tab.page.screenshot(path=lab.folder / f"{request.node.name}-{number}.png")
    for tab in tabs:
        tab.kernel_ends = True
    for kernel in json.loads(context.request.get(f"{lab.url}api/sessions").text()):
        context.request.delete(f"{lab.url}api/sessions/{kernel['id']}?token={TOKEN}")
    for tab in tabs:
        assert tab.complaints == []
