"""What older torch can't do, by name; newer torch does it (or has it) in the same places."""

import re
import subprocess
import sys
import textwrap

import pytest
from support import MODERN, environment


def python(code, path=None):
    env = environment()
    if path:
        env["PYTHONPATH"] += f":{path}"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("line", ["import paceline.torch", "from paceline._torch import backend; backend.register()"])
@pytest.mark.parametrize("module", ["fsdp", "fsdp.fully_sharded_data_parallel"])
def test_fsdp_is_there_or_a_named_error_twice_over(line, module):
    output = python(f"""
        {line}
        import importlib, paceline
        for _ in range(2):
            try:
                importlib.import_module("torch.distributed.{module}")
                print("imported")
            except paceline.UnsupportedError as error:
                assert isinstance(error, ImportError) and isinstance(error.__cause__, Exception)
                print(error)
        """)
    if MODERN:
        assert output == "imported\nimported\n"
        return
    for sentence in output.splitlines():
        assert sentence.startswith("torch 1.") and "torch.distributed.fsdp" in sentence, output
        assert "ZeroRedundancyOptimizer, or torch 2 or later" in sentence, output
    assert len(output.splitlines()) == 2


@pytest.mark.parametrize("line", ["import paceline.torch", "from paceline._torch import backend; backend.register()"])
@pytest.mark.parametrize(
    ("module", "name"), [("torch", "compile"), ("torch.amp", "GradScaler"), ("torch.cpu.amp", "GradScaler")]
)
def test_names_of_newer_torch_are_there_or_a_named_error(line, module, name):
    """Whichever way a script asks; who asks whether there is one, or has another way without it, goes on as before."""
    output = python(f"""
        import {module}
        absent = not hasattr({module}, "{name}")
        {line}
        import paceline
        assert absent != hasattr({module}, "{name}") and (getattr({module}, "{name}", None) is None) == absent
        try:
            {module}.{name}
            print("there")
        except paceline.UnsupportedError as error:
            assert isinstance(error, AttributeError)
            print(error)
        try:
            from {module} import {name}
            print("there")
        except paceline.UnsupportedError as error:
            assert isinstance(error, ImportError)
            print(error)
        for other in ("no_such_name", "{name}s"):
            try:
                getattr({module}, other)
            except AttributeError as error:
                assert not isinstance(error, paceline.PacelineError) and other in str(error), error
            try:
                exec(f"from {module} import {{other}}")
            except ImportError as error:
                assert not isinstance(error, paceline.PacelineError) and other in str(error), error
        """)
    if MODERN:
        assert output == "there\nthere\n"
        return
    sentences = output.splitlines()
    assert len(sentences) == 2 and len(set(sentences)) == 1, output
    sentence = rf"torch 1\.\S+ has no {module}\.{name}; .*, or (use )?torch 2\S* or later"
    assert re.fullmatch(sentence, sentences[0]), output


def test_several_devices_in_one_backend_are_torchs_own_matter():
    """Newer torch takes one backend a device; 1.13 refuses the text as it stands."""
    output = python("""
        import tempfile, torch, torch.distributed as dist
        from paceline._torch import backend
        backend.register()
        with tempfile.TemporaryDirectory() as folder:
            try:
                dist.init_process_group("cpu:paceline", init_method=f"file://{folder}/x", rank=0, world_size=1)
                tensor = torch.ones(2)
                dist.all_reduce(tensor)
                print("sum", tensor.tolist())
                dist.destroy_process_group()
            except ValueError as error:
                print(error)
        """)
    assert output == ("sum [1.0, 1.0]\n" if MODERN else "Invalid backend: 'cpu:paceline'\n")


def test_scalers_for_the_cpu():
    """1.13's own GradScaler says that it does nothing without CUDA; Paceline leaves it so."""
    output = python("""
        import warnings, torch
        import paceline.torch
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            from torch.cuda.amp import GradScaler
            scaler = torch.amp.GradScaler("cpu") if hasattr(torch.amp, "GradScaler") else GradScaler()
        print(scaler.is_enabled(), any("Disabling" in str(w.message) for w in said))
        weight = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        print(weight.item())
        """)
    assert output == ("True False\n0.0\n" if MODERN else "False True\n0.0\n")


def test_steps_of_optimizers_made_before_the_import_are_heard():
    output = python("""
        import torch
        weight = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        import paceline.torch
        from paceline._torch.residuals import ResidualSteps
        heard = []
        class Steps:
            def optimizer_stepped(self, which):
                heard.append(which)
        ResidualSteps.every = staticmethod(lambda: [Steps()])
        class Mine(torch.optim.Optimizer):
            def step(self, closure=None):
                pass
        for one in (optimizer, torch.optim.Adam([weight]), Mine([weight], {})):
            weight.grad = torch.ones(1)
            one.step()
            assert heard.pop() is one and not heard
        print("ok")
        """)
    assert output == "ok\n"


def test_only_the_named_modules_errors_are_translated(tmp_path):
    (tmp_path / "first_broken.py").write_text("raise ValueError('first')\n")
    (tmp_path / "second_broken.py").write_text("raise ValueError('second')\n")
    (tmp_path / "whole.py").write_text("value = 3\n")
    output = python(
        """
        from paceline import _import_hook as hook
        for name in ("first_broken", "whole", "not_there_either"):
            hook.when_import_fails(name, lambda error: ImportError(f"translated {error}"))
        hook.when_imported("second_broken", lambda module: print("never"))
        hook.when_imported("whole", lambda module: print("whole", module.value))
        for name in ("first_broken", "second_broken", "whole", "not_there_at_all", "not_there_either"):
            try:
                __import__(name)
            except Exception as error:
                print(type(error).__name__, error)
        """,
        tmp_path,
    )
    assert output.splitlines() == [
        "ImportError translated first",
        "ValueError second",
        "whole 3",
        "ModuleNotFoundError No module named 'not_there_at_all'",
        "ImportError translated No module named 'not_there_either'",
    ]
