"""Views and the bytes of a storage that travel for them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.offload.compare import same_bits
from torch import Tensor, nn

from tidegate.offload.storage import ByteRange, ViewSpec, owned_storages


def span(view: Tensor, *, alone: bool = False) -> ByteRange:
    return ViewSpec.of(view).range_in(view.untyped_storage().nbytes(), alone=alone)


def test_a_view_of_most_of_a_storage_takes_the_whole() -> None:
    x = torch.zeros(100, 10)
    assert span(x) == span(x[40:]) == span(x.t()) == ByteRange(0, 4000)


def test_a_view_of_little_takes_its_own_bytes() -> None:
    x = torch.zeros(100, 10)
    assert span(x[90:]) == ByteRange(3600, 4000)


def test_a_sparse_view_travels_dense() -> None:
    x = torch.zeros(100, 10)
    assert span(x[:, 0]).dense
    assert ViewSpec.of(x[:, 0]).nbytes == 400


def test_an_expanded_view_counts_its_elements_once() -> None:
    x = torch.zeros(1, 10).expand(1000, 10)
    assert ViewSpec.of(x).nbytes == 40
    assert span(x) == ByteRange(0, 40)


def test_a_part_that_counts_its_edits_alone_takes_no_byte_of_the_others() -> None:
    left, right = torch.zeros(8, 20).unsafe_chunk(2, 1)
    assert span(left, alone=True).dense
    assert span(right, alone=True).dense
    assert span(torch.zeros(100)[60:], alone=True) == ByteRange(240, 400)


def test_an_empty_view_has_no_bytes() -> None:
    assert ViewSpec.of(torch.zeros(0, 5)).nbytes == 0
    assert ViewSpec.of(torch.zeros(3, 5)[:, :0]).extent == 0


DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.bool]


@given(st.data())
def test_every_view_is_rebuilt_over_a_copy_of_its_bytes(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    storage = torch.randint(0, 2, (2048,), dtype=torch.uint8)
    flat = storage.view(dtype)
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    stride = tuple(data.draw(st.integers(0, 6)) for _ in shape)
    offset = data.draw(st.integers(0, 20))
    view = flat.as_strided(shape, stride, offset)
    if dtype.is_complex and data.draw(st.booleans()):
        view = view.conj()
    spec, whole = ViewSpec.of(view), view.untyped_storage()
    shift = 64
    base = torch.zeros(4096, dtype=torch.uint8)
    base[shift : shift + whole.nbytes()] = storage
    again = spec.over(base, shift)
    assert again.stride() == view.stride()
    assert again.is_conj() == view.is_conj()
    assert same_bits(
        again.clone(memory_format=torch.contiguous_format), view.clone(memory_format=torch.contiguous_format)
    )


def test_a_strided_base_of_another_type_can_be_viewed() -> None:
    real = torch.arange(64, dtype=torch.float32).reshape(4, 8, 2)
    complex_ = torch.view_as_complex(real).t()
    assert same_bits(ViewSpec.of(real.transpose(0, 1)).over(complex_, 0), real.transpose(0, 1))
    assert same_bits(ViewSpec.of(complex_).over(real.permute(2, 1, 0), 0), complex_)


def test_a_rebuilt_view_tells_of_edits() -> None:
    base = torch.zeros(64, dtype=torch.uint8)
    view = ViewSpec.of(torch.zeros(2, 4)).over(base, 0)
    before = base._version
    view.add_(1)
    assert base._version > before


def test_parameters_and_buffers_are_owned_by_storage() -> None:
    model = nn.BatchNorm1d(4)
    owned = {storage._cdata for storage in owned_storages(model)}
    assert model.running_mean is not None
    for tensor in (model.weight, model.bias[1:], model.running_mean, model.weight.detach()):
        assert tensor.untyped_storage()._cdata in owned


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_lazy_and_sparse_parameters_have_no_storage_to_own() -> None:
    model = nn.Module()
    model.lazy = nn.LazyLinear(3)
    model.sparse = nn.Parameter(torch.eye(3).to_sparse())
    assert list(owned_storages(model)) == []
