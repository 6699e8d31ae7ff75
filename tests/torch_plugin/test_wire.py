"""What gradients are rounded to between nodes (FCDP_REDUCE_DTYPE)."""

import pytest
import torch

from conftest import needs_fcdp

pytestmark = needs_fcdp


@pytest.fixture(params=["bf16", "int8"])
def wire(request, monkeypatch):
    from fcdp import _fcdp, settings, wire

    monkeypatch.setitem(settings.options, "reduce_dtype", getattr(_fcdp, f"REDUCE_DTYPE_{request.param.upper()}"))
    return wire.wire_for(torch.float32)


def back(wire, rows):
    return torch.stack([wire.unpack(row, rows.shape[1]) for row in wire.pack(rows)])


@pytest.mark.parametrize("n", [1, 255, 256, 257, 4096])
def test_values_come_back_rounded_and_what_was_sent_is_as_it_was(wire, n):
    rows = torch.randn(3, n, generator=torch.Generator().manual_seed(n)) * torch.logspace(-30, 30, n)
    before = rows.clone()
    off = (back(wire, rows) - rows).abs()
    assert torch.equal(rows, before)
    if wire.pack(rows).shape[1] == 2 * n:
        assert torch.all(off <= rows.abs() / 256)
    else:
        for block, of_block in zip(rows.split(256, dim=1), off.split(256, dim=1)):
            assert torch.all(of_block <= block.abs().amax(1, keepdim=True) / 127 * 0.5001)
    assert not back(wire, torch.zeros(2, n)).any()


TINY = torch.finfo(torch.float32).tiny


@pytest.mark.parametrize("most", [1e-45, TINY / 3, TINY, 1e-37, 126 * TINY, 128 * TINY, 1e-30, 1.0, 3.4e38])
@pytest.mark.parametrize("wire", ["int8"], indirect=True)
def test_values_of_any_magnitude_are_off_by_at_most_half_the_scale_that_is_sent(wire, most):
    rows = torch.linspace(-1, 1, 4 * 256).mul(most).view(4, 256)
    (packed,) = wire.pack(rows.view(1, -1))
    scales = packed[: 4 * 4].view(torch.float32).double().unsqueeze(-1)
    assert torch.all(scales <= max(most / 127, TINY) * 1.0001)
    off = wire.unpack(packed, rows.numel()).view_as(rows).double() - rows.double()
    assert torch.all(off.abs() <= scales * 0.5001)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_stays_so(wire, value):
    rows = torch.ones(2, 600)
    rows[1, 300] = value
    came = back(wire, rows)
    assert not torch.isfinite(came[1, 300])
    assert torch.isfinite(came[0]).all() and torch.isfinite(came[1, :256]).all() and torch.isfinite(came[1, 512:]).all()


def test_what_would_be_no_smaller_crosses_as_it_is(monkeypatch):
    from fcdp import _fcdp, settings, wire

    monkeypatch.setitem(settings.options, "reduce_dtype", _fcdp.REDUCE_DTYPE_BF16)
    assert wire.wire_for(torch.bfloat16) is None and wire.wire_for(torch.float16) is None
    monkeypatch.setitem(settings.options, "reduce_dtype", _fcdp.REDUCE_DTYPE_INT8)
    assert wire.wire_for(torch.bfloat16) is not None


def test_alone_the_option_says_that_it_has_no_effect(monkeypatch, capfd):
    from fcdp import settings

    monkeypatch.setattr(settings, "options", dict(settings.options))
    monkeypatch.setattr(settings, "_settled", False)
    monkeypatch.setattr(settings, "_read", {})
    for reduce, says in (("flat", True), ("hierarchical", False)):
        monkeypatch.setenv("FCDP_REDUCE", reduce)
        monkeypatch.setenv("FCDP_REDUCE_DTYPE", "int8")
        settings._settled = False
        settings.settle()
        assert ("no effect without FCDP_REDUCE=hierarchical" in capfd.readouterr().err) == says
