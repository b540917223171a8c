"""What is sent with the user's function, and the errors for what cannot be sent."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import io
import linecache
import logging
import pickle
import socket
import subprocess
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from pyspark.sql import SparkSession

from tests.conftest import ENVIRONMENT
from tfos_nb.errors import PlanError
from tfos_nb.runtime.code.payload import pack, unpack
from tfos_nb.runtime.code.user_modules import UserModule, provide

Namespace = dict[str, Any]


def cell(source: str, name: str = "main", filename: str = "<cell 7>", **names: Any) -> Any:
    """Define a function as a notebook's cell does: in ``__main__``, with the notebook's variables as globals."""
    namespace: Namespace = {"__name__": "__main__", **names}
    exec(compile(textwrap.dedent(source), filename, "exec"), namespace)
    return namespace[name]


def call(payload: bytes) -> Any:
    main, args = unpack(payload)
    return main(args, None)


@pytest.fixture
def module(tmp_path: Path) -> Iterator[Callable[[str, str], ModuleType]]:
    """Import a module of the user's that exists beside the notebook and not on the executors."""
    made: list[str] = []

    def build(name: str, source: str) -> ModuleType:
        file = tmp_path / f"{name}.py"
        file.write_text(textwrap.dedent(source))
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        built = importlib.util.module_from_spec(spec)
        sys.modules[name] = built
        made.append(name)
        spec.loader.exec_module(built)
        return built

    yield build
    for name in made:
        sys.modules.pop(name, None)


def call_elsewhere(payload: bytes, tmp_path: Path) -> str:
    """Call ``main`` in a process that has neither the test's modules nor the cell."""
    file = tmp_path / "payload"
    file.write_bytes(payload)
    script = """if True:
        import sys
        from tfos_nb.runtime.code.payload import unpack
        main, args = unpack(open(sys.argv[1], "rb").read())
        print(main(args, None))
    """
    ended = subprocess.run(
        [sys.executable, "-c", script, str(file)], env=ENVIRONMENT, capture_output=True, text=True, check=False, cwd="/"
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


# --- what is sent ---------------------------------------------------------------------------------


def test_a_cells_function_is_sent_with_its_globals_and_helpers(tmp_path: Path) -> None:
    main = cell(
        """
        import math
        RATE = 3
        class Scale:
            def __init__(self, by): self.by = by
        def outer(x):
            def inner(y): return y * RATE
            return inner(x) + math.floor(Scale(0.5).by)
        def main(args, ctx): return outer(args["x"])
        """
    )
    assert call(pack(main, {"x": 5})) == 15
    assert call_elsewhere(pack(main, {"x": 5}), tmp_path) == "15"


def test_a_closure_is_sent_with_its_variables(tmp_path: Path) -> None:
    factor, weights = 2, np.arange(3.0)

    def main(args: Any, ctx: Any) -> Any:
        return [factor * number for number in weights.tolist()]

    assert call_elsewhere(pack(main, None), tmp_path) == "[0.0, 2.0, 4.0]"


def test_changes_after_packing_are_not_sent() -> None:
    names = {"RATE": [1]}
    main = cell("def main(args, ctx): return RATE", **names)
    payload = pack(main, None)
    names["RATE"].append(2)
    assert call(payload) == [1]


def test_a_function_of_a_local_module_is_sent_by_value(
    module: Callable[[str, str], ModuleType], tmp_path: Path
) -> None:
    training = module(
        "my_training",
        """
        STEP = 4
        def helper(x): return x + STEP
        def main(args, ctx): return helper(args)
        """,
    )
    payload = pack(training.main, 3)
    assert call_elsewhere(payload, tmp_path) == "7"


FILES = {
    "my_helpers.py": "import my_package.deep.numbers as numbers\ndef helper(x): return numbers.add(x) + 1",
    "my_package/__init__.py": "",
    "my_package/deep/numbers.py": "from ..more import MORE\nclass Number:\n    pass\ndef add(x): return x + MORE",
    "my_package/more.py": "from . import most\nMORE = most.MOST",
    "my_package/most.py": "MOST = 10",
    "my_package/unused.py": "raise RuntimeError('nobody names it')",
}


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Modules beside a notebook, in a folder on Python's search path."""
    folder = tmp_path / "beside"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] in ("my_helpers", "my_package")]:
        del sys.modules[name]


def carried(payload: bytes) -> set[str]:
    return set(pickle.loads(payload)[1].modules)


ALL = {"my_helpers", "my_package", "my_package.deep", "my_package.deep.numbers", "my_package.more", "my_package.most"}


def test_modules_beside_the_notebook_are_sent_with_the_modules_they_import(beside: Path, tmp_path: Path) -> None:
    helper = importlib.import_module("my_helpers").helper
    payload = pack(cell("def main(args, ctx): return helper(args)", helper=helper), 3)
    assert carried(payload) == ALL
    assert call_elsewhere(payload, tmp_path) == "14"


def test_the_modules_of_an_arguments_class_are_sent(beside: Path, tmp_path: Path) -> None:
    number = importlib.import_module("my_package.deep.numbers").Number()
    payload = pack(cell("def main(args, ctx): return type(args['n']).__name__"), {"n": number})
    assert carried(payload) == ALL - {"my_helpers"}
    assert call_elsewhere(payload, tmp_path) == "Number"


def test_modules_imported_inside_a_function_are_sent_but_not_imported_here(
    beside: Path, tmp_path: Path, forgotten: str
) -> None:
    text = "def main(args, ctx):\n    import numpy, my_helpers\n    return my_helpers.helper(args)\n"
    linecache.cache[forgotten] = (len(text), None, text.splitlines(keepends=True), forgotten)
    payload = pack(cell(text, filename=forgotten), 3)
    assert carried(payload) == ALL
    assert "my_helpers" not in sys.modules
    assert call_elsewhere(payload, tmp_path) == "14"


def test_a_failure_in_a_sent_module_shows_its_line(beside: Path, tmp_path: Path) -> None:
    (beside / "my_helpers.py").write_text("def helper(x):\n    return x['no such key']  # here\n")
    helper = importlib.import_module("my_helpers").helper
    main = cell(
        """
        def main(args, ctx):
            import traceback
            try:
                helper({})
            except KeyError:
                return traceback.format_exc()
        """,
        helper=helper,
    )
    payload = pack(main, None)
    (beside / "my_helpers.py").unlink()
    told = call_elsewhere(payload, tmp_path)
    assert "my_helpers.py" in told
    assert "# here" in told


@pytest.fixture
def provided() -> Iterator[Callable[..., None]]:
    """Provide modules to this process as source text; their files exist nowhere."""

    def give(**texts: str) -> None:
        provide({name: UserModule(f"/nowhere/{name}.py", text, False) for name, text in texts.items()})

    before = list(sys.meta_path)
    yield give
    sys.meta_path[:] = before


def test_a_changed_module_and_the_modules_that_import_it_are_imported_again(
    beside: Path, provided: Callable[..., None]
) -> None:
    """One process unpickles several functions in turn, as Spark's Python workers do."""
    uses = "import my_package_rate\nVALUE = my_package_rate.RATE"
    provided(my_package_rate="RATE = 1", my_package_use=uses)
    imported = importlib.import_module("my_package_use")
    try:
        provided(my_package_use=uses)
        assert sys.modules["my_package_use"] is imported, "nothing has changed"
        provided(my_package_rate="RATE = 2")
        assert (imported.VALUE, importlib.import_module("my_package_use").VALUE) == (1, 2)
    finally:
        for name in ("my_package_use", "my_package_rate"):
            sys.modules.pop(name, None)


def test_a_local_module_of_the_same_name_does_not_replace_the_users(
    beside: Path, provided: Callable[..., None]
) -> None:
    provided(my_helpers="WHERE = 'the driver'")
    assert importlib.import_module("my_helpers").WHERE == "the driver"


def test_a_local_module_with_the_same_text_is_used_from_its_own_folder(
    beside: Path, provided: Callable[..., None]
) -> None:
    provided(my_helpers=FILES["my_helpers.py"])
    assert importlib.import_module("my_helpers").__file__ == str(beside / "my_helpers.py")


def test_a_sent_package_finds_its_unsent_submodules_in_the_local_package(
    beside: Path, provided: Callable[..., None]
) -> None:
    provide({"my_package": UserModule("/nowhere/my_package/__init__.py", "CHANGED = True", True)})
    package = importlib.import_module("my_package")
    assert (package.CHANGED, importlib.import_module("my_package.most").MOST) == (True, 10)


def test_modules_beyond_the_size_limit_are_not_sent_and_are_named(
    beside: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tfos_nb.runtime.code.user_modules._MOST", 20)
    helper = importlib.import_module("my_helpers").helper
    pack(cell("def main(args, ctx): return helper(args)", helper=helper), 3)
    assert "my_helpers and those after it are not sent" in caplog.text


def test_packing_leaves_cloudpickles_registered_modules_unchanged(module: Callable[[str, str], ModuleType]) -> None:
    from pyspark import cloudpickle

    training = module("my_training", "def main(args, ctx): return 1")
    pack(training.main, None)
    assert cloudpickle.list_registry_pickle_by_value() == set()
    with pytest.raises(PlanError):
        pack(training.main, threading.Lock())
    assert cloudpickle.list_registry_pickle_by_value() == set()
    cloudpickle.register_pickle_by_value(training)  # the user's own registration is kept
    try:
        pack(training.main, None)
        assert cloudpickle.list_registry_pickle_by_value() == {"my_training"}
    finally:
        cloudpickle.unregister_pickle_by_value(training)


def test_a_function_of_an_installed_package_is_sent_by_name() -> None:
    assert len(pack(np.linalg.norm, None)) < 2000


@pytest.mark.parametrize("args", [None, 3, {"a": [1, (2, 3)]}, np.float32(1.5)], ids=str)
def test_the_args_arrive_unchanged(args: Any) -> None:
    came = call(pack(cell("def main(args, ctx): return args"), args))
    assert came == args
    assert type(came) is type(args)


def test_a_bound_method_and_a_partial_are_accepted(tmp_path: Path) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.rate = 2

        def run(self, args: Any, ctx: Any) -> Any:
            return args * self.rate

    assert call_elsewhere(pack(Trainer().run, 4), tmp_path) == "8"
    assert call(pack(functools.partial(cell("def main(more, args, ctx): return more + args"), 10), 4)) == 14


def test_a_lambda_is_accepted() -> None:
    assert call(pack(lambda args, ctx: args + 1, 1)) == 2


# --- what cannot be sent --------------------------------------------------------------------------


def test_spark_and_its_data_are_named_with_what_to_do_instead(spark: SparkSession) -> None:
    main = cell("def main(args, ctx): return thing")
    frame = spark.range(2)
    found = {}
    for name, thing in {
        "SparkSession": spark,
        "SparkContext": spark.sparkContext,
        "DataFrame": frame,
        "RDD": spark.sparkContext.parallelize([1]),
        "PipelinedRDD": spark.sparkContext.parallelize([1]).map(str),
        "Broadcast": spark.sparkContext.broadcast([1]),
    }.items():
        with pytest.raises(PlanError) as caught:
            pack(cell("def main(args, ctx): return thing", thing=thing), None)
        found[name] = str(caught.value)
    begins = "main refers to thing, "
    never = "which cannot be sent to the nodes: "
    assert found == {
        "SparkSession": f"{begins}a SparkSession, {never}it exists only on the driver",
        "SparkContext": f"{begins}a SparkContext, {never}it exists only on the driver",
        "DataFrame": f"{begins}a DataFrame, {never}feed it with --data thing, or cluster.train(thing)",
        "RDD": f"{begins}an RDD, {never}feed it with --data thing, or cluster.train(thing)",
        "PipelinedRDD": f"{begins}a PipelinedRDD, {never}feed it with --data thing, or cluster.train(thing)",
        "Broadcast": f"{begins}a Broadcast, {never}use its .value",
    }
    with pytest.raises(PlanError, match=r"^args\['a'\], a DataFrame, which cannot be sent"):
        pack(main, {"a": frame})


def things_that_stay() -> dict[str, Callable[[], Any]]:
    return {
        "a lock": threading.Lock,
        "an RLock": threading.RLock,
        "a Thread": lambda: threading.Thread(name="t"),
        "a socket": socket.socket,
        "a generator": lambda: (number for number in range(2)),
        "a TextIOWrapper": lambda: open(__file__, encoding="utf-8"),
        "a BufferedReader": lambda: open(__file__, "rb"),
        "a BytesIO": io.BytesIO,
    }


@pytest.fixture(params=things_that_stay(), ids=str)
def staying(request: pytest.FixtureRequest) -> Iterator[tuple[str, Any]]:
    thing = things_that_stay()[request.param]()
    yield request.param, thing
    if hasattr(thing, "close"):
        thing.close()


KEPT = "class Kept:\n    def main(self, args, ctx): ...\nkept = Kept()"
PLACES = [
    ("main refers to thing", "def main(args, ctx): return thing"),
    ("helper refers to thing", "def helper(): return thing\ndef main(args, ctx): return helper()"),
    ("deepest refers to thing", "def deepest(): return thing\ndef helper(): deepest()\ndef main(a, c): helper()"),
    ("main refers to thing", "def main(a, c):\n    def nested(): return [thing for _ in ()]\n    return nested()"),
    ("main refers to thing", "def main(a, c):\n    class Nested:\n        attribute = thing"),
    (r"main refers to holder\['inner'\]", "holder = {'inner': [thing]}\ndef main(args, ctx): return holder"),
    ("main refers to own", "def main(args, ctx, own=thing): ..."),
    ("main refers to own", "def main(args, ctx, *, own=thing): ..."),
    (r"main refers to Kept\.inner", "class Kept: inner = thing\ndef main(args, ctx): return Kept"),
    (r"main refers to kept\.inner\[0\]", f"{KEPT}\nkept.inner = {{0: thing}}\ndef main(args, ctx): return kept"),
    ("use refers to thing", "class Kept:\n    def use(self): return thing\ndef main(a, c): return Kept().use()"),
    (r"main refers to self\.inner", f"{KEPT}\nkept.inner = thing\nmain = kept.main"),
    (r"argument 2 of partial\(go, …\)", "import functools\ndef go(*a): ...\nmain = functools.partial(go, 1, thing)"),
    (r"own of partial\(go, …\)", "import functools\ndef go(*a, own): ...\nmain = functools.partial(go, own=thing)"),
]


@pytest.mark.parametrize(("where", "source"), PLACES)
def test_an_object_that_cannot_be_sent_is_named_with_its_location(
    staying: tuple[str, Any], where: str, source: str
) -> None:
    kind, thing = staying
    if kind == "a BytesIO" and "Kept" in source:
        pytest.skip("as an attribute it travels, with what it holds")
    with pytest.raises(
        PlanError, match=rf"^{where}, {kind}, which cannot be sent to the nodes: \w.*inside the function$"
    ):
        pack(cell(source, thing=thing), None)


@pytest.mark.parametrize("where", ["args", r"args\['x'\]"])
def test_an_object_in_the_args_that_cannot_be_sent_is_named(staying: tuple[str, Any], where: str) -> None:
    kind, thing = staying
    args = thing if where == "args" else {"x": (1, [thing])}
    with pytest.raises(PlanError, match=rf"^{where}, {kind}, which cannot be sent to the nodes"):
        pack(cell("def main(args, ctx): ..."), args)


def test_a_closure_variable_that_cannot_be_sent_is_named() -> None:
    lock = threading.Lock()

    def main(args: Any, ctx: Any) -> Any:
        return lock

    with pytest.raises(PlanError, match="^main refers to lock, a lock, which"):
        pack(main, None)


def test_a_local_modules_variable_that_cannot_be_sent_is_named(module: Callable[[str, str], ModuleType]) -> None:
    training = module("my_training", "import threading\nLOCK = threading.Lock()\ndef main(args, ctx):\n    return LOCK")
    with pytest.raises(PlanError, match="^main refers to LOCK, a lock, which"):
        pack(training.main, None)


def test_a_variable_that_the_function_does_not_use_may_be_anything() -> None:
    main = cell("def main(args, ctx): return 1", lock=threading.Lock())
    assert call(pack(main, None)) == 1


def test_functions_that_call_each_other_are_packed() -> None:
    main = cell(
        "def even(n): return n == 0 or odd(n - 1)\n"
        "def odd(n): return n != 0 and even(n - 1)\n"
        "main = lambda n, _: even(n)"
    )
    assert call(pack(main, 10)) is True


def test_an_unlisted_type_is_named_with_the_part_that_cannot_be_pickled() -> None:
    main = cell(f"import queue\n{KEPT}\nkept.jobs = [1, queue.Queue()]\ndef main(args, ctx): return kept")
    told = r"main refers to kept\.jobs, a Queue, which cannot be sent .*'_thread.lock' object\. Make it inside main"
    with pytest.raises(PlanError, match=f"^{told}$"):
        pack(main, None)


def test_async_functions_and_generators_are_refused() -> None:
    with pytest.raises(PlanError, match="^main is async, and a node calls it as main"):
        pack(cell("async def main(args, ctx): return 1"), None)
    with pytest.raises(PlanError, match="^main is a generator"):
        pack(cell("def main(args, ctx):\n    yield 1"), None)


class Unwilling:
    def __reduce__(self) -> Any:
        raise TypeError("I stay here\nand say so at length")


def test_any_other_pickling_failure_is_one_line_with_the_reason() -> None:
    with pytest.raises(PlanError) as caught:
        pack(cell("def main(args, ctx): ..."), Unwilling())
    assert str(caught.value) == (
        "args, an Unwilling, which cannot be sent to the nodes: I stay here. Make it inside main"
    )


@pytest.mark.parametrize("main", [None, 3, "main"])
def test_a_main_that_is_not_a_function_is_refused(main: Any) -> None:
    with pytest.raises(PlanError, match=f"main must be a function .*, got a {type(main).__name__}"):
        pack(main, None)


def test_large_objects_are_reported_as_large(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("tfos_nb.runtime.code.payload._BIG", 2 << 20)
    main = cell("def main(args, ctx): return weights", weights=np.zeros(3 << 20, np.uint8))
    with caplog.at_level(logging.WARNING):
        pack(main, None)
    assert "main and what it refers to take 3 MiB, which every node receives" in caplog.text


# --- tracebacks -----------------------------------------------------------------------------------


@pytest.fixture
def forgotten() -> Iterator[str]:
    filename = "<cell of a test>"
    yield filename
    linecache.cache.pop(filename, None)


SOURCE = "def main(args, ctx):\n    return args['no such key']\n"


def test_a_traceback_shows_the_cells_line(forgotten: str) -> None:
    main, args = unpack(pack(cell(SOURCE, filename=forgotten), {}, {forgotten: SOURCE}))
    with pytest.raises(KeyError) as caught:
        main(args, None)
    assert "return args['no such key']" in "".join(traceback.format_exception(caught.value))


def test_a_cells_source_is_found_in_the_notebooks_cache(forgotten: str) -> None:
    linecache.cache[forgotten] = (len(SOURCE), None, SOURCE.splitlines(keepends=True), forgotten)
    payload = pack(cell(SOURCE, filename=forgotten), {})
    linecache.cache.pop(forgotten)
    unpack(payload)
    assert linecache.getline(forgotten, 2) == "    return args['no such key']\n"


def test_a_local_modules_lines_are_shown_where_its_file_is_missing(
    module: Callable[[str, str], ModuleType], tmp_path: Path
) -> None:
    training = module("my_training", SOURCE)
    payload = pack(training.main, {})
    file = tmp_path / "my_training.py"
    file.unlink()
    linecache.checkcache(str(file))
    main, args = unpack(payload)
    with pytest.raises(KeyError) as caught:
        main(args, None)
    assert "return args['no such key']" in "".join(traceback.format_exception(caught.value))


BRANCHING = """
def main(args, ctx):
    import tensorflow as tf

    numbers = tf.data.Dataset.range(5).map(lambda n: n if n > 2 else -n)
    return [int(n) for n in numbers]
"""


def test_autograph_compiles_the_lambdas_of_a_module_without_its_file(
    module: Callable[[str, str], ModuleType],
) -> None:
    payload = pack(module("my_branches", BRANCHING).main, {})
    del sys.modules["my_branches"]
    main, args = unpack(payload)
    assert main(args, None) == [0, -1, -2, 3, 4]
    assert "my_branches" not in sys.modules


HELPER = """
def helper(x: np.ndarray) -> Any:
    if tf.reduce_sum(x) > 0:
        return x
    return -x
"""
CALLING = """
def main(args, ctx):
    import tensorflow as tf

    return float(tf.function(helper)(tf.constant(-2.0)))
"""


@pytest.fixture
def cells_of_a_notebook() -> Iterator[list[str]]:
    """Two cells as IPython compiles them; the test then removes their sources from the cache."""
    texts = {"<cell of the helper>": HELPER, "<cell of main>": CALLING}
    for name, text in texts.items():
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    yield list(texts)
    for name in texts:
        linecache.cache.pop(name, None)


def test_autograph_compiles_an_annotated_function_of_another_cell(cells_of_a_notebook: list[str]) -> None:
    import tensorflow as tf

    first, second = cells_of_a_notebook
    helper = cell(HELPER, "helper", first, np=np, Any=Any, tf=tf)
    payload = pack(cell(CALLING, "main", second, helper=helper), {})
    for name in cells_of_a_notebook:
        del linecache.cache[name]
    assert call(payload) == 2.0
    assert "".join(linecache.getlines(first)) == HELPER


def test_sources_of_installed_packages_are_not_sent() -> None:
    def main(args: Any, ctx: Any) -> Any:
        return wrapped()

    wrapped = contextlib.contextmanager(iter)  # wraps the function in one of Python's own
    _, found = pickle.loads(pack(main, {}))
    assert list(found.files) == [__file__]


def test_a_payload_is_only_data_until_it_is_unpacked(forgotten: str) -> None:
    """The driver and the supervisor pass bytes on; only the node's process unpickles the function."""
    data, sources = pickle.loads(pack(cell(SOURCE, filename=forgotten), {}, {forgotten: SOURCE}))
    assert isinstance(data, bytes)
    assert sources.files == {forgotten: SOURCE}
