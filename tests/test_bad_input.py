"""A failure on one rank ends all ranks soon, with that rank's error. Each case is a job of its own.

Errors that a program can catch are in mpi/engine/test_engine_errors.py and
mpi/keras/data_parallel/test_bad_input.py.

MPI worlds that do not open are in world/test_mpi.py; more ranks than slots are in commands/test_run.py.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import hvpipe
from distributed import ALONE, Run, environment, expect_fatal, launch, mpirun_command, run
from hvpipe.commands.supervise import own_job_folder
from hvpipe.trace.events import Trace
from native_build import build

LIMIT_S = 180.0
# The limit from the error to the end of all ranks. mpirun itself takes a second or two.
SOON_S = 15.0

# The launcher's variables give the rank before MPI starts.
RANK = "os.environ.get('OMPI_COMM_WORLD_RANK', os.environ.get('PMI_RANK'))"
INIT = """
import os, signal, sys, time
import numpy as np
import hvpipe
hvpipe.init()
rank = hvpipe.rank()
def say_when(): print(f"failing at {time.time()}", flush=True)
"""
STEP = """
from hvpipe.plan.buckets import Gradient, plan_buckets
from hvpipe.session import current
engine = current().engine
plan = engine.add_plan("model", plan_buckets([Gradient("kernel", (300,), "float32")], 1000))
ones = np.ones(300, np.float32)
def begin(step): return engine.native.begin_step(plan, step, 1.0, True)[0]
def finish(scale):
    engine.native.submit(plan, 0, [ones], scale)
    engine.native.collect(plan, 0, [np.empty(300, np.float32)])
finish(begin(1))
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "case.py"
    path.write_text(text)
    return path


def assert_soon(result: Run) -> None:
    """Check that all ranks ended soon after the rank that announced its failure."""
    failed_s = float(result.output.split("failing at ")[1].split()[0])
    assert time.time() - failed_s < SOON_S, result.describe()


def fails(tmp_path: Path, text: str, says: str, size: int = 2, **env: str) -> Run:
    result = expect_fatal(size, write(tmp_path, text), says=says, within_s=LIMIT_S, env=env)
    if "say_when()" in text.replace("def say_when()", ""):
        assert_soon(result)
    return result


# --- A rank fails or leaves -------------------------------------------------------------------------------


def test_a_rank_that_raises_in_the_middle_of_a_step(tmp_path: Path) -> None:
    script = """
def innermost(): raise ValueError("the data are gone")
scale = begin(2)
if rank == 1:
    say_when()
    innermost()
finish(scale)
"""
    says = r"(?s)rank 1 of 2 on \S+ failed:\nTraceback.*case.py.*in innermost.*ValueError: the data are gone"
    result = fails(tmp_path, INIT + STEP + script, says)
    assert "rank 0 of 2" not in result.output


def test_a_rank_that_raises_while_the_others_wait_in_a_collective(tmp_path: Path) -> None:
    script = (
        "if rank == 2:\n    time.sleep(0.5)\n    say_when()\n    {}['absent']\nhvpipe.allreduce(np.ones(9))"
    )
    fails(tmp_path, INIT + script, r"(?s)rank 2 of 3 .*KeyError: 'absent'", size=3)


def test_a_rank_that_raises_while_it_joins(tmp_path: Path) -> None:
    script = """
import hvpipe.session, os, time
def prepare(session):
    if session.world.rank == 1:
        print(f"failing at {time.time()}", flush=True)
        raise ValueError("no GPU for this rank")
hvpipe.session.when_joined(prepare)
"""
    result = fails(
        tmp_path, script + INIT + "hvpipe.barrier()", r"rank 1 of 2 .*\n(.*\n)*ValueError: no GPU for"
    )
    assert_soon(result)


def test_rank_0_decides_what_is_recorded(tmp_path: Path) -> None:
    """mpirun does not pass HVPIPE_* to other hosts, so rank 0's settings count."""
    script = """
import os
if os.environ["OMPI_COMM_WORLD_RANK"] != "0": del os.environ["HVPIPE_TRACE"]
"""
    trace = tmp_path / "trace.json"
    case = write(tmp_path, script + INIT + "assert hvpipe.trace_path()")
    result = launch(2, [case], limit_s=LIMIT_S, env={"HVPIPE_TRACE": str(trace)})
    assert result.returncode == 0, result.describe()
    assert {event.rank for event in Trace.read(trace).events} == {0, 1}


def test_a_rank_that_skips_a_step(tmp_path: Path) -> None:
    script = "say_when()\nif rank == 0: finish(begin(2))\nhvpipe.barrier()"
    says = r"(?s)rank . of 2 .* failed:.*The ranks disagree about what comes next"
    result = fails(tmp_path, INIT + STEP + script, says)
    assert "training step 2 of model" in result.output
    assert "barrier" in result.output


def test_a_rank_that_leaves_with_an_exit_code(tmp_path: Path) -> None:
    """Regression: the code was lost, and the error named what hvpipe does at the end."""
    script = "say_when()\nif rank == 1: sys.exit(3)\nfinish(begin(2))"
    where = r"Rank 1 is at: sys.exit\(3\) in case.py, line \d+. Rank 0 is at: training"
    says = f"(?s)rank 1 of 2 .*SystemExit: .*{where}"
    assert fails(tmp_path, INIT + STEP + script, says).returncode == 3


@pytest.mark.parametrize(
    ("leave", "where", "code"),
    [
        ("sys.exit('no data')", r"sys.exit\('no data'\) in case.py", 1),
        ("raise SystemExit(4)", "the end of its script, or SystemExit", 4),
        ("sys.exit(0)", r"sys.exit\(0\) in case.py", 1),
    ],
)
def test_a_rank_that_leaves_while_the_others_wait_in_shared_memory(
    leave: str, where: str, code: int, tmp_path: Path
) -> None:
    script = f"if rank == 1: {leave}\nhvpipe.allreduce(np.ones(9))"
    says = rf"rank 1 of 3 .*\n.*this rank left while others still need it. Rank 1 is at: {where}"
    assert fails(tmp_path, INIT + script, says, size=3).returncode == code


def test_a_rank_that_never_comes_to_shutdown(tmp_path: Path) -> None:
    """Regression: the others waited for it without a limit and without a word."""
    script = "say_when()\nif rank == 1: time.sleep(100)"
    waited = "rank 0 on .* has waited 1 s in shutdown for rank 1"
    ended = "Waited 4 s in shutdown for rank 1 to say what it does next.* HVPIPE_SHUTDOWN_TIMEOUT"
    fails(tmp_path, INIT + script, f"(?s){waited}.*{ended}", HVPIPE_SHUTDOWN_TIMEOUT="4")


def test_ranks_that_all_leave_with_an_exit_code_keep_it(tmp_path: Path) -> None:
    result = launch(2, [write(tmp_path, INIT + "sys.exit(3)")], limit_s=LIMIT_S)
    assert result.returncode == 3, result.describe()
    assert "disagree" not in result.output


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_rank_that_is_killed(number: signal.Signals, tmp_path: Path) -> None:
    script = f"""
if rank == 1:
    say_when()
    os.kill(os.getpid(), {number.value})
hvpipe.allreduce(np.ones(9))
"""
    fails(tmp_path, INIT + script, "failing at")


KILLED = "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)"
ENDED = r"PeerError: The process of rank 1 on \S+ \(pid \d+\) has ended"
IN_INIT = """
import os, signal
import hvpipe.world.mpi
def limited(world, what, usual=hvpipe.world.mpi.MpiWorld._limited):
    if world.rank == 1 and what.endswith(WHERE): os.kill(os.getpid(), signal.SIGKILL)
    return usual(world, what)
hvpipe.world.mpi.MpiWorld._limited = limited
"""


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (INIT + KILLED + "\nhvpipe.allreduce(np.ones(9))", ENDED),
        (INIT + KILLED, ENDED),
        (IN_INIT.replace("WHERE", "'communicators'") + INIT, "rank . of 3 on .* waited 3 s in calls of MPI"),
        (IN_INIT.replace("WHERE", "'engine'") + INIT, "rank . of 3 on .* waited 3 s in calls of MPI"),
    ],
    ids=["collective", "shutdown", "making communicators", "making the engine"],
)
def test_a_rank_is_killed_and_the_launcher_does_not_notice(script: str, says: str, tmp_path: Path) -> None:
    """As with srun without -K. A shell that stays hides the loss from mpirun."""
    shell = '"$@"; code=$?; [ $code = 137 ] && sleep 50; exit $code'
    command = [*mpirun_command(3), "sh", "-c", shell, "sh", sys.executable]
    result = run([*command, str(write(tmp_path, script))], limit_s=30.0, env={"HVPIPE_TIMEOUT": "3"})
    assert not result.timed_out, result.describe()
    assert result.returncode != 0, result.describe()
    assert re.search(says, result.output), result.describe()


BY_NAME = """
import os, signal
import hvpipe
from hvpipe.session import current
hvpipe.init()
def call(): current().named_calls().barrier("x", 0)
call()
if hvpipe.rank() == 0: os.kill(os.getpid(), signal.SIGNAL)
call()
"""
# Rank 1 has called, and is killed a second before rank 0 calls: then rank 0 waits for its data.
IN_EXCHANGE = """
import os, signal, threading, time
import tensorflow as tf
import hvpipe
import hvpipe.horovod.tensorflow as hvd
hvd.init()
def call(): hvd.allreduce(tf.ones(3), name="x")
call()
if hvpipe.rank() == 1: threading.Thread(target=call).start()
time.sleep(2 - hvpipe.rank())
if hvpipe.rank() == 1: os.kill(os.getpid(), signal.SIGKILL)
call()
"""


@pytest.mark.parametrize(
    ("size", "script", "says"),
    [
        (3, BY_NAME.replace("SIGNAL", "SIGKILL"), r"The process of rank 0 on \S+ \(pid \d+\) has ended"),
        (
            3,
            BY_NAME.replace("SIGNAL", "SIGSTOP"),
            "Rank 0 should answer barrier named x within 3 s .* no answer",
        ),
        (2, IN_EXCHANGE, r"rank 1 on \S+ \(pid \d+\) has ended"),
    ],
    ids=["killed", "stopped", "killed after its call"],
)
def test_a_rank_is_lost_in_a_collective_by_name(size: int, script: str, says: str, tmp_path: Path) -> None:
    """Regression: the others waited for ever, unless rank 0 could tell them."""
    shell = '"$@"; code=$?; [ $code = 137 ] && sleep 50; exit $code'
    command = [*mpirun_command(size), "sh", "-c", shell, "sh", sys.executable]
    result = run([*command, str(write(tmp_path, script))], limit_s=80.0, env={"HVPIPE_TIMEOUT": "3"})
    assert not result.timed_out, result.describe()
    assert result.returncode != 0, result.describe()
    assert re.search(says, result.output), result.describe()


def test_a_rank_that_stops_before_it_finalises_mpi(tmp_path: Path) -> None:
    """Regression: the others waited in MPI_Finalize without a limit."""
    script = "hvpipe.shutdown()\nsay_when()\nif rank == 1: os.kill(os.getpid(), signal.SIGSTOP)"
    fails(tmp_path, INIT + script, "rank 0 on .* waited 3 s in MPI_Finalize", HVPIPE_SHUTDOWN_TIMEOUT="3")


def test_a_rank_is_lost_when_the_others_have_nothing_left_to_do(tmp_path: Path) -> None:
    """Their work is done, so the job succeeds. Threads that went on to call MPI ended it with 14."""
    script = "hvpipe.allreduce(np.ones(9))\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)"
    command = [sys.executable, "-m", "hvpipe", "run", "--elastic", "-np", "3"]
    result = run([*command, str(write(tmp_path, INIT + script))], limit_s=LIMIT_S)
    assert result.returncode == 0, result.describe()
    assert "rank 1 of 3 was lost in shutdown" in result.output


@pytest.mark.parametrize(
    "call", ["hvpipe.allreduce(np.ones(9))", "current().named_calls().barrier('late', 0)"]
)
def test_a_call_during_which_a_rank_is_lost_names_it(call: str, tmp_path: Path) -> None:
    """Regression: under --elastic it ended with MPI's own error, which names neither rank nor call."""
    script = """
from hvpipe.session import current
current().named_calls().barrier("all", 0)
if rank == 1: os.kill(os.getpid(), signal.SIGKILL)
try: CALL
except hvpipe.PeerError as error: print("ENDED", error, flush=True)
"""
    command = [sys.executable, "-m", "hvpipe", "run", "--elastic", "-np", "3"]
    path = write(tmp_path, INIT + script.replace("CALL", call))
    result = run([*command, str(path)], limit_s=LIMIT_S)
    ended = re.findall("ENDED Only `fit` continues .*(?:rank 1|a rank) of 3 was lost", result.output)
    assert len(ended) == 2, result.describe()


@pytest.mark.parametrize("call", ["hvpipe.allreduce(np.ones(9))", "by_name()"])
def test_a_job_that_is_suspended_goes_on(call: str, tmp_path: Path) -> None:
    """As by `scontrol suspend`. Regression: the first rank that ran again found that nothing had moved."""
    script = """
import subprocess, time
pids = hvpipe.allgather_object(os.getpid())
from hvpipe.session import current
def by_name(): current().named_calls().barrier("x", 0)
if rank == 0:
    one, two = pids
    suspend = f"sleep 1; kill -STOP {one} {two}; sleep 6; kill -CONT {one}; sleep 1; kill -CONT {two}"
    subprocess.Popen(["sh", "-c", suspend], start_new_session=True)
else:
    time.sleep(2)
CALL
print("WENT ON", flush=True)
"""
    script = INIT + script.replace("CALL", call)
    result = launch(2, [write(tmp_path, script)], limit_s=LIMIT_S, env={"HVPIPE_TIMEOUT": "4"})
    assert result.returncode == 0, result.describe()
    assert result.output.count("WENT ON") == 2


def test_a_gpu_that_is_lost_on_one_rank(tmp_path: Path) -> None:
    """NCCL reports the loss only to that rank. The other rank waits for it, and ends when it ends."""
    script = """
from devices import OnDevice
array = OnDevice(np.ones(1000, np.float32))
def reduce(): hvpipe.allreduce(array, op="sum", out=array)
reduce()
assert (array.values == 2).all()
if rank == 1:
    say_when()
    os.environ["FAKE_NCCL"] = "async"
while True: reduce()
"""
    device = str(build("fake_device.cc"))
    libraries = {"HVPIPE_DEVICE_LIBRARY": device, "HVPIPE_NCCL_LIBRARY": str(build("fake_nccl.cc"))}
    wanted = r"(?s)rank 1 of 2 .*PeerError: .*remote process exited"
    result = fails(tmp_path, INIT + script, wanted, **libraries, FAKE_NCCL_DEVICE=device)
    assert "rank 0 of 2" not in result.output, result.describe()


def test_no_weights_are_saved_whose_gradients_never_came(tmp_path: Path) -> None:
    """The GPU waits for a sum that rank 0 has collected, and rank 1 never adds to it."""
    script = """
from devices import OnDevice
from hvpipe.plan.buckets import Gradient, plan_buckets
from hvpipe.session import current
engine = current().engine
engine.use_device()
plan = plan_buckets([Gradient("kernel", (300,), "float32")], 1000)
number = engine.add_plan("model", plan, on_device=True)
engine.native.begin_step(number, 0, 1.0, True)
if rank == 1: time.sleep(60)
weights = OnDevice(np.zeros(300, np.float32))
engine.submit_on_device(number, 0, [OnDevice(np.ones(300, np.float32))], 1.0)
engine.collect_on_device(number, 0, [weights], on_stream=True)
weights.values  # waits for the device
print("these weights are saved", flush=True)
"""
    device = str(build("fake_device.cc"))
    libraries = {"HVPIPE_DEVICE_LIBRARY": device, "HVPIPE_NCCL_LIBRARY": str(build("fake_nccl.cc"))}
    limits = {"HVPIPE_TIMEOUT": "2", "HVPIPE_FIRST_STEP_TIMEOUT": "2"}
    wanted = "rank 0 of 2 exits with code 1, because sums of gradients that its GPU waits for .* Waited 2"
    result = fails(
        tmp_path, INIT + "import time\n" + script, wanted, **libraries, **limits, FAKE_NCCL_DEVICE=device
    )
    assert "are saved" not in result.output


def test_an_interrupt_of_one_rank(tmp_path: Path) -> None:
    script = """
if rank == 1:
    say_when()
    os.kill(os.getpid(), signal.SIGINT)
hvpipe.allreduce(np.ones(9))
"""
    assert fails(tmp_path, INIT + script, "KeyboardInterrupt").returncode == 130


@pytest.mark.parametrize("waits_in", ["time.sleep(60)", "hvpipe.allreduce(ones) if rank else time.sleep(60)"])
def test_control_c(waits_in: str, tmp_path: Path) -> None:
    script = f"ones = np.ones(9)\nopen(f'ready.{{os.getpid()}}', 'w').close()\n{waits_in}"
    command = [*mpirun_command(2), sys.executable, str(write(tmp_path, INIT + script))]
    with (
        own_job_folder(environment()) as environ,
        subprocess.Popen(
            command, cwd=tmp_path, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process,
    ):
        try:
            deadline_s = time.monotonic() + LIMIT_S
            while len(ready := list(tmp_path.glob("ready.*"))) < 2 and time.monotonic() < deadline_s:
                time.sleep(0.05)
            assert len(ready) == 2
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
            assert process.wait(SOON_S) != 0
        finally:
            process.kill()
    pids = [int(path.suffix[1:]) for path in ready]
    _, alive = psutil.wait_procs([psutil.Process(p) for p in pids if psutil.pid_exists(p)], timeout=5)
    assert not alive


# --- Keras: two jobs only, because TensorFlow starts slowly ------------------------------------------------

KERAS = """
import warnings
warnings.simplefilter("ignore")
import keras
import tensorflow as tf
import hvpipe.keras as hk
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
x, y = np.random.rand(40, 3).astype(np.float32) + rank, np.ones((40, 1), np.float32)
"""


def test_a_dataset_of_unknown_length_that_ends_early_on_one_rank(tmp_path: Path) -> None:
    script = """
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4).take(7 if rank else 10)
data = data.filter(lambda *_: True)  # so that nobody knows its length
model.compile("sgd", "mse")
hk.data_parallel(model).fit(data, epochs=2, verbose=0)
"""
    says = r"(?s)rank \d of 2 .* failed:.*The ranks disagree about what comes next"
    result = fails(tmp_path, INIT + KERAS + script, says)
    assert "training step 8 of" in result.output, result.describe()
    assert "end of epoch 1" in result.output, result.describe()


@pytest.mark.older_tensorflow
def test_a_model_that_raises_inside_a_step_on_one_rank(tmp_path: Path) -> None:
    script = """
def loss(wanted, found):
    def check():
        seen.append(1)
        if rank == 1 and len(seen) == 3:
            say_when()
            raise ValueError("a sample that nobody can learn")
        return np.float32(0)
    with tf.control_dependencies([tf.py_function(check, [], tf.float32)]):
        return tf.reduce_mean((wanted - found) ** 2)
seen = []
model.compile("adam", loss)
hk.data_parallel(model).fit(x, y, batch_size=4, verbose=0)
"""
    says = r"(?s)rank 1 of 2 .* failed:.*case.py.*ValueError: a sample that nobody can learn"
    fails(tmp_path, INIT + KERAS + script, says)


def test_training_on_after_a_step_that_raised_on_all_ranks(tmp_path: Path) -> None:
    script = """
def checked(wanted, kernel):
    if wanted.numpy().max() > 100:
        raise ValueError("a wrong target")
    return 0.0
def metric(wanted, found):  # reads a weight, so that it runs after the step began and updated it
    checks = tf.py_function(checked, [wanted, model.trainable_variables[0]], tf.float32)
    return tf.ensure_shape(checks, ())
model.compile("adam", "mse", metrics=[metric])
hk.data_parallel(model, overlap="backward").fit(x, y, batch_size=4, verbose=0)
try:
    model.fit(x, y + 1000, batch_size=4, verbose=0)
except tf.errors.OpError:
    say_when()
other = keras.Sequential([keras.Input(x.shape[1:]), keras.layers.Dense(y.shape[1])])
other.compile("adam", "mse")
hk.data_parallel(other).fit(x, y, batch_size=4, verbose=0)
"""
    says = r"(?s)A step ended with an error on this rank.*Received: .*a wrong target"
    fails(tmp_path, INIT + KERAS + script, says)


def test_a_pipeline_trains_on_after_ctrl_c_within_a_step(tmp_path: Path) -> None:
    """Regression: its messages waited for those of the step that it left, until the time limit."""
    script = """
seen = []
def press():
    seen.append(1)
    if len(seen) == 3:
        say_when()
        signal.raise_signal(signal.SIGINT)
    return np.float32(0)
def loss(wanted, found):
    with tf.control_dependencies([tf.numpy_function(press, [], tf.float32)]):
        return tf.reduce_mean((wanted - found) ** 2)
def build():
    layers = [keras.Input(x.shape[1:]), keras.layers.Dense(4), keras.layers.Dense(y.shape[1])]
    return keras.Sequential(layers)
pipe = hk.pipeline_parallel(build, microbatches=2)
pipe.compile("adam", loss)
try:
    pipe.fit(x, y, batch_size=4, verbose=0)
except KeyboardInterrupt:
    pass
pipe.fit(x, y, batch_size=4, verbose=0)
"""
    says = r"(?s)A step ended with an error on this rank.*Received: KeyboardInterrupt"
    fails(tmp_path, INIT + KERAS + script, says)


# --- Missing or unsuitable software -----------------------------------------------------------------------


def test_mpi_initialised_without_thread_support_on_one_rank(tmp_path: Path) -> None:
    """When the failing rank exits, MPI waits for the other rank, which waits for it in `init`."""
    level = f"'single' if {RANK} == '1' else 'multiple'"
    before = f"import os, mpi4py; mpi4py.rc.thread_level = {level}; from mpi4py import MPI\n"
    fails(tmp_path, before + INIT, r"rank 1 of 2 on .* failed:\n(.*\n)*.*InitError: hvpipe needs an MPI")


def test_a_rank_that_does_not_join(tmp_path: Path) -> None:
    """The late rank has started MPI. If it had not, other MPIs would wait in MPI_Init."""
    script = f"import time\nfrom mpi4py import MPI\nif MPI.COMM_WORLD.rank == 1: time.sleep(600)\n{INIT}"
    says = r"Rank 0 of 2 on .* waited for the other ranks in hvpipe.init\(\)"
    fails(tmp_path, script, says, HVPIPE_TIMEOUT="2")


WITHOUT_MPI = """
import sys
sys.modules["mpi4py"] = sys.modules["hvpipe._engine"] = None
"""


def test_one_rank_needs_no_mpi(tmp_path: Path) -> None:
    script = """
assert hvpipe.size() == 1 and hvpipe.allgather_object("a") == ["a"]
assert (hvpipe.allreduce(np.ones(3, np.float32)) == 1).all()
hvpipe.shutdown()
print("well")
"""
    result = launch(ALONE, [write(tmp_path, WITHOUT_MPI + INIT + script)], limit_s=LIMIT_S)
    assert (result.returncode, result.output) == (0, "well\n"), result.describe()


def test_an_engine_that_does_not_load(tmp_path: Path) -> None:
    says = r"InitError: hvpipe's compiled engine does not load.*rebuild in hvpipe's .* && pip install"
    fails(tmp_path, "import sys; sys.modules['hvpipe._engine'] = None\n" + INIT, says)


def test_the_source_folder_before_an_hvpipe_that_is_installed(tmp_path: Path) -> None:
    """Regression: in a clone after `pip install .`, the error advised a rebuild, which does not help."""
    source = Path(hvpipe.__file__).parent
    shutil.copytree(
        source, tmp_path / "hvpipe", ignore=shutil.ignore_patterns("*.so*", "_build_info.py", "__py*")
    )
    (tmp_path / "CMakeLists.txt").touch()
    script = write(
        tmp_path,
        "import sys\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if 'ScikitBuild' not in type(f).__name__]\n"
        "from hvpipe.environment.native import import_native\n"
        "import_native()\n",
    )
    result = launch(ALONE, [script], limit_s=LIMIT_S)
    assert (
        "If hvpipe is installed, start Python in another folder; otherwise run pip install -e"
        in result.output
    )


def test_another_mpi_than_hvpipe_was_built_with(tmp_path: Path) -> None:
    script = "import hvpipe._build_info as built\nbuilt.MPI_LIBRARY = 'Another MPI v9.1'\n" + INIT
    built = r"BuildMismatchError: hvpipe was built with Another MPI v9.1"
    says = built + r", but .* runs.*rebuild it here in hvpipe's .* && pip install"
    fails(tmp_path, script, says)


@pytest.mark.older_tensorflow
def test_keras_on_another_backend(tmp_path: Path) -> None:
    """The other backend need not be installed."""
    script = "import warnings\nwarnings.simplefilter('ignore')\nimport hvpipe.keras"
    says = r"InitError: hvpipe.keras needs Keras 3\.12 or later on TensorFlow.*KERAS_BACKEND.*Received: .*jax"
    fails(tmp_path, script, says, size=ALONE, KERAS_BACKEND="jax")


@pytest.mark.older_tensorflow
@pytest.mark.parametrize(
    ("built", "says"),
    [
        (
            "'2.21.0'",
            r"BuildMismatchError: hvpipe was built against TensorFlow 2\.21\.0, but TensorFlow 2\.99\.1 runs"
            r".*rebuild hvpipe here in hvpipe's .* && pip install",
        ),
        (
            "None",
            r"BuildMismatchError: hvpipe was built without TensorFlow.*Rebuild it .* && pip install",
        ),
    ],
)
def test_a_tensorflow_newer_than_hvpipe_was_built_for(built: str, says: str, tmp_path: Path) -> None:
    # The check uses only TensorFlow's version, so an empty module suffices.
    script = f"""
import sys, types
sys.modules["tensorflow"] = types.ModuleType("tensorflow")
sys.modules["tensorflow"].__version__ = "2.99.1"
import hvpipe._build_info
hvpipe._build_info.TENSORFLOW_VERSION = {built}
import hvpipe
print("hvpipe alone is fine")
import hvpipe.keras
"""
    assert "is fine" in fails(tmp_path, script, says, size=ALONE).output
