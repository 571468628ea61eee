"""Hostile config files, options and names: refused before anything is imported."""

import os
import sys

import pytest

from tests.hostile.conftest import PRIVACY

pytestmark = pytest.mark.hostile

DIGITS = ["1e-6" if flag == "1e-3" else flag for flag in PRIVACY]
TOML = {
    "not TOML": "data = ",
    "a zero byte": 'data = "dig\x00its"',
    "a key twice": 'data = "digits"\ndata = "digits"',
    "a table twice": "[run]\nseed = 1\n[run]\nseed = 2",
    "deep brackets": "data = " + "[" * 5000,
    "deep and closed": "data = " + "[" * 5000 + "]" * 5000,
    "deep tables": "[" + ".".join("a" * 5000) + "]\nb = 1",
    "deep inline tables": "run = " + "{a=" * 3000 + "1" + "}" * 3000,
    "a huge integer": "[run]\nseed = " + "9" * 4000,
    "an integer of 5000 digits": "[run]\nseed = " + "9" * 5000,
    "epsilon nan": "[privacy]\nepsilon = nan",
    "epsilon inf": "[privacy]\nepsilon = inf",
    "epsilon huge": "[privacy]\nepsilon = 1" + "0" * 400,
    "noise nan": "[privacy]\nnoise_multiplier = nan",
    "noise huge": "[privacy]\nnoise_multiplier = 1" + "0" * 400,
    "delta nan": "[privacy]\ndelta = nan",
    "delta -inf": "[privacy]\ndelta = -inf",
    "rate nan": "[privacy]\nsample_rate = nan\nsteps = 3\nexpected_batch_size = 3",
    "rate huge": "[privacy]\nsample_rate = 1" + "0" * 400
    + "\nsteps = 3\nexpected_batch_size = 3",
    "batch huge": "[privacy]\nexpected_batch_size = 1" + "0" * 400
    + "\nsteps = 3\nsample_rate = 0.1",
    "steps huge": "[privacy]\nsample_rate = 0.1\nsteps = 1" + "0" * 400
    + "\nexpected_batch_size = 3",
    "steps of years": "[privacy]\nsample_rate = 0.1\nsteps = 1" + "0" * 18
    + "\nexpected_batch_size = 3",
    "epochs huge": "[privacy]\nbatch_size = 64\nepochs = 1" + "0" * 400,
    "an unknown table": "[evil]\nx = 1",
    "an unknown key": "[run]\n__class__ = 1",
    "a list for a table": "run = [1]",
    "a number for data": "data = 3",
    "a date for data": "data = 2026-01-01",
    "a list for a model": 'model = ["mlp"]',
    "a number for a model": "[model]\nname = 3",
    "a number for a recipe": "[recipe]\nname = 3",
    "a list for a recipe": "[recipe]\nname = []",
    "a table for a source": "[data]\nsource = { a = 1 }",
    "a list of numbers as metrics": "[run]\nmetrics = [1, 2]",
    "lists as metrics": "[run]\nmetrics = [[1]]",
    "a number as metrics": "[run]\nmetrics = 3",
    "validation nan": "[run]\nvalidation = nan",
    "validation huge": "[run]\nvalidation = 1" + "0" * 400,
    "a text for a seed": '[run]\nseed = "1"',
    "truth for a seed": "[run]\nseed = true",
    "a negative seed": "[run]\nseed = -5",
    "views huge": "[run]\nviews = 1" + "0" * 30 + '\naugment = "flips"',
    "a device with a path": '[run]\ndevice = "../../dev/sda"',
    "format as a list": "[data]\nsource = \"digits\"\nformat = [1]",
    "a dunder option": '[data]\nsource = "digits"\n__class__ = 1',
    "mean nan": '[data]\nsource = "digits"\nmean = nan\nstd = 1',
    "std zero": '[data]\nsource = "digits"\nmean = 0\nstd = 0',
    "mean as text": '[data]\nsource = "digits"\nmean = "x"\nstd = 1',
    "mean huge": '[data]\nsource = "digits"\nmean = 1' + "0" * 400 + "\nstd = 1",
    "width of a terabyte": '[model]\nname = "mlp"\nwidth = 1' + "0" * 12,
    "width beyond int64": '[model]\nname = "mlp"\nwidth = 1' + "0" * 30,
    "depth of a million": '[model]\nname = "mlp"\ndepth = 1000000000',
    "width negative": '[model]\nname = "mlp"\nwidth = -3',
    "width as a list": '[model]\nname = "mlp"\nwidth = [3]',
    "rate of learning nan": '[recipe]\nname = "dp-sgd"\nlearning_rate = nan',
    "rate of learning huge": '[recipe]\nname = "dp-sgd"\nlearning_rate = 1' + "0" * 400,
    "clip inf": '[recipe]\nname = "dp-sgd"\nclip_norm = inf',
    "clip as a list": '[recipe]\nname = "dp-sgd"\nclip_norm = [1]',
    "probe size huge": '[recipe]\nname = "dp-kfc"\nprobe_size = 1' + "0" * 30,
}  # fmt: skip


@pytest.mark.parametrize("case", TOML)
def test_toml(refused, tmp_path, case):
    text = TOML[case]
    if "data" not in text:
        text = 'data = "digits"\n' + text
    (tmp_path / "config.toml").write_text(text)
    flags = ["--device", "cpu", "--run-dir", "run"]
    if "[privacy]" not in text:
        flags = [*flags, "--noise-multiplier", "2", "--epochs", "1"]
    if "device" in case:
        flags = flags[2:]
    message = refused("train", "--config", "config.toml", *flags)
    assert "internal error" not in message


def test_a_config_that_is_no_text(refused, tmp_path):
    for content in (b"\xff\xfe\x00", b"\x80\x04pickle", os.urandom(100) + b"\xff"):
        (tmp_path / "config.toml").write_bytes(content)
        assert "config.toml" in refused("train", "--config", "config.toml")
    (tmp_path / "zero.toml").symlink_to("/dev/zero")
    assert "zero.toml" in refused("train", "--config", "zero.toml")
    assert "config" in refused("train", "--config", tmp_path)


NAMES = [
    "os:system", "subprocess:getoutput", "subprocess:Popen", "builtins:eval",
    "builtins:exec", "builtins:__import__", "shutil:rmtree", "runpy:run_path",
    "importlib:import_module", "pickle:loads", "pty:spawn", "webbrowser:open",
    "antigravity:fly", "this:s", "os.path:join", "code:interact", "ctypes:CDLL",
    "torch:load", "torch.hub:load", "torch.jit:load", "numpy:load",
    "torch.serialization:load",
    "torch.utils.cpp_extension:load", "numpy.ctypeslib:load_library", "typer:launch",
    "curvedp.storage:remove_folder", "torch.nn:Module.__init__", "math:sqrt",
    "..evil:make", ".:make", "evil/../x:make", ":make", "evil:", "a:b:c", "http://x:y",
    "/etc/passwd:x", "torch.nn.functional:linear",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_names_that_try_imports(refused, tmp_path, name, trap):
    known = set(sys.modules)
    options = [f"-M{k}=touch {trap}" for k in ("command", "cmd", "args", "source", "f")]
    flags = ["--data", "digits", *DIGITS, "--model", name, *options]
    message = refused("train", *flags)
    assert name in message
    assert not {"antigravity", "this", "webbrowser", "pty"} & (set(sys.modules) - known)


@pytest.mark.parametrize(
    ("name", "argument"),
    [("os:system", "command"), ("subprocess:getoutput", "cmd")],
)
def test_arguments_that_fit_run_nothing_either(refused, name, argument, trap):
    flags = ["--data", "digits", *DIGITS, "--model", name]
    refused("train", *flags, "-M", f"{argument}=touch {trap}")


@pytest.mark.parametrize(
    "name", ["os:system", "../dp-sgd", "dp_sgd", "__class__", "\x1b[2J"]
)
def test_recipes_that_try_imports(refused, name):
    refused("train", "--data", "digits", *DIGITS, "--recipe", name)


@pytest.mark.parametrize("name", ["os:system", "torch:load"])
def test_the_doctor_and_the_auditor_import_no_more(refused, name, trap):
    option = f"command=touch {trap}"
    refused("doctor", name, "--input-shape", "3", "--option", option)
    refused("audit", "--data", "digits", "--model", name, "-M", option)


OPTIONS = [
    "num_classes=0", "num_classes=-1", "num_classes=1.5", 'num_classes="ten"',
    "num_classes=[10]", "num_classes=true", "num_classes=nan",
    "num_classes=1" + "0" * 30,
    "num_classes=1" + "0" * 400, "num_classes=1000000000000", "num_classes={a=1}",
    "num_classes=" + "[" * 3000, "task=3", 'task="eval"', "target_range=[nan,1]",
    "target_range=[0,1" + "0" * 400 + "]", "target_range=3", "test=3", "test=[1]",
    'test="../nowhere.npz"', "test=/dev/zero", "with_test=false", "path=3", "format=3",
    'format="pickle"', "format=[1]", "mean=[1,2,3]", "mean=[[1]]", "self=1", "schema=3",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS, ids=lambda o: o[:30])
def test_wrong_declarations(refused, blobs, option):
    flags = ["--data", blobs, *PRIVACY, "-D", option]
    if not option.startswith("num_classes"):
        flags += ["-D", "num_classes=3"]
    refused("train", *flags)


FOLDER_OPTIONS = [
    "channels=[]", "channels=0", 'channels="3"', "image_size=0",
    "image_size=1" + "0" * 30,
    'image_size="4"', "image_size=[4]", "image_size=[4,4.5]", "image_size=true",
    "image_size=nan", "classes=3", "classes=[3]", 'classes=["cat","cat"]',
    "classes=[[1]]",
    "image_size={a=1}",
]  # fmt: skip


@pytest.mark.parametrize("option", FOLDER_OPTIONS)
def test_wrong_declarations_of_images(refused, tmp_path, option):
    (tmp_path / "pictures" / "cat").mkdir(parents=True)
    options = {"classes": 'classes=["cat"]', "image_size": "image_size=4"}
    options[option.partition("=")[0]] = option
    flags = [x for o in options.values() for x in ("-D", o)]
    refused("train", "--data", "pictures", *PRIVACY, *flags)


NUMBERS = ["nan", "inf", "-inf", "-1", "1e400", "0", "9" * 40, "9" * 4000, "1e-320"]


@pytest.mark.slow
@pytest.mark.parametrize("number", NUMBERS, ids=lambda n: n[:8])
@pytest.mark.parametrize("name", ["epsilon", "delta", "sample-rate"])
def test_numbers_of_calibration(refused, name, number):
    if (name, number) in (("sample-rate", "1e-320"), ("delta", "1e-320")):
        return  # small, and fine
    given = {"epsilon": "1", "sample-rate": "0.1", "steps": "10", "delta": "1e-5"}
    if name == "epsilon" and number in ("9" * 40, "1e-320"):
        return  # budgets that need next to no noise, or all of it
    given[name] = number
    flags = [x for k, v in given.items() for x in (f"--{k}", v)]
    refused("privacy", "calibrate", *flags)


@pytest.mark.parametrize("steps", ["9" * 40, "9" * 400, "1000000000000"])
@pytest.mark.parametrize("sigma", ["1e-300", "1", "1e300"])
def test_more_steps_than_anybody_makes(refused, steps, sigma):
    flags = ["--sigma", sigma, "--sample-rate", "0.5", "--steps", steps]
    refused("privacy", "epsilon", *flags)
