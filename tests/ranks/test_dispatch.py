"""What ranks do together besides sampling (dispatch.py), and the memory through which rank 0 broadcasts."""

from datetime import timedelta

import pytest
import torch
from launch import run_ranks

from backend.parallel import mesh
from backend.planner.machine import Machine
from backend.quantization import kernels
from backend.serving import shared_memory
from backend.serving.shared_memory import SharedBuffer


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.full)], ids="{} ranks".format)
def ranks(request) -> int:
    return request.param


@pytest.fixture(scope="module")
def results(ranks, tmp_path_factory) -> dict:
    """What the program has found on so many ranks; one run for all tests."""
    return run_ranks("ranks.dispatch", ranks, tmp_path_factory.mktemp("dispatch"))


def test_every_rank_receives_every_byte(results):
    assert all(results["shared"]["right"]) and all(results["by broadcast"]["right"])


def test_some_bodies_go_through_shared_memory(results):
    assert results["shared"]["shared"] >= 1 and results["by broadcast"]["shared"] is None


def test_every_rank_decides_alike_in_one_collective(ranks, results):
    """Of the same numbers; and the backend goes on after a refusal."""
    refusal = {str(ranks - 1): 11 * 10**9}
    assert results["admission"] == {"decided": [[refusal, "admitted"]] * ranks, "collectives": 1}


def test_parked_weights_come_back_where_there_is_room(ranks, results):
    """Those of a rank that is parked alone; of all, those without room leave all as they were."""
    last, every = ranks - 1, list(range(ranks))
    alone = [[last], [last], "prepared", []]
    assert results["parks"] == [alone + [every, every, every[:-1], every]] * ranks


def test_noise_is_rank_0s_where_gpus_differ(ranks, results):
    """Other GPUs draw other numbers from the same seed, under every method."""
    assert all(all(found.values()) for found in results["noise"]) and len(results["noise"]) == ranks
    assert [len(found) for found in results["noise"]] == [3 * (5 if ranks == 2 else 4)] * ranks


def test_a_gather_of_equal_tensors_has_each_in_its_place(ranks, results):
    assert results["gathered"] == [[True, True]] * ranks


def test_the_probe_sends_as_much_whichever_type_a_rank_computes_in(ranks, results):
    assert results["unlike"] == [results["unlike"][0]] * ranks and all(results["unlike"][0].values())


def test_ranks_wait_for_hours_on_every_axis(results):
    """Their peers may work for that long."""
    assert results["timeouts"] == [mesh.TIMEOUT.total_seconds()] and mesh.TIMEOUT >= timedelta(hours=1)


def test_rates_are_measured(ranks, results):
    rates = Machine.from_dict(results["rates"])
    assert rates.ranks == ranks and rates.on_host and set(rates.all_to_all) == set(rates.rings) == {ranks}
    slowest = min(rates.gemm, rates.attention, rates.bandwidth, rates.p2p, *rates.all_to_all.values())
    slowest = min(slowest, rates.host_link, *rates.rings.values())
    assert slowest > 1e5 and 0 < rates.latency < 10 and rates.alone >= 1
    assert list(rates.native_rates) == ["int8_tensorwise"] * (kernels.kitchen()[0] is not None)


def pair(ranks: int = 2) -> list[SharedBuffer]:
    """Every rank's end, all in this process."""
    first, told = SharedBuffer.make(ranks)
    return [first, *(SharedBuffer.join(told, ranks, rank) for rank in range(1, ranks))]


def test_a_body_stays_until_every_rank_has_it():
    first, second, third = pair(3)
    parts = [torch.arange(5, dtype=torch.uint8), torch.arange(3, dtype=torch.uint8)]
    number = first.write(parts)
    assert number and second.read(number, 8).tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert not first.write(parts)  # the third has not
    third.read(number, 8)
    assert first.write(parts) == number + 1


def test_what_does_not_fit_is_sent_otherwise(monkeypatch):
    monkeypatch.setattr(shared_memory, "MAX_BYTES", 1 << 16)
    first, second = pair()
    assert not first.write([torch.zeros(1 << 16, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)])
    assert second.read(first.write([torch.ones(1 << 16, dtype=torch.uint8)]), 1 << 16).all()


def test_a_file_of_the_same_number_on_another_machine_is_not_taken_for_it():
    first, (pid, file, sign) = SharedBuffer.make(2)
    with pytest.raises(ValueError, match="another machine"):
        SharedBuffer.join([pid, file, "0" * len(sign)], 2, 1)
    with pytest.raises(OSError):
        SharedBuffer.join([pid, 10**6, sign], 2, 1)
