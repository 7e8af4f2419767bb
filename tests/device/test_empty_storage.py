"""Storages without memory: torch refuses to read them, if it is built with CUDA. Here its switch is imitated."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ssd.activations.weights import storage_of
from tests.support.access import Toy, fit


def test_weights_are_readable_exactly_while_they_have_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: dict[int, str] = {}
    refuse, allow = refused.__setitem__, lambda storage: refused.pop(storage, None)
    monkeypatch.setattr(torch._C, "_set_storage_data_ptr_access_error_msg", refuse, raising=False)
    monkeypatch.setattr(torch._C, "_clear_storage_data_ptr_access_error_msg", allow, raising=False)
    found: list[tuple[bool, str]] = []

    def look(module: Any) -> None:
        for name, parameter in module.named_parameters():
            storage = storage_of(parameter)
            assert (storage._cdata in refused) == (storage.nbytes() == 0) == (not parameter.flat.resident)
            found.append((parameter.flat.resident, refused.get(storage._cdata, name)))
        view = module.blocks[0].up.weight.detach()
        assert storage_of(view).nbytes() or storage_of(view)._cdata in refused

    module = Toy("on_train_batch_end", look)
    module.blocks[0].up.register_forward_hook(lambda *_: look(module))
    fit(tmp_path, module, "host")
    assert {resident for resident, _ in found} == {True, False}
    assert all("whole_weights" in text for resident, text in found if not resident)
