"""The judgement of the topologies bench: what is not as the model says is found."""

from dataclasses import replace

import pytest

from tasks.core.transfer_model import EACH_FROM_HUB, SHARDED_EXCHANGE, SHARDED_PULL, STORE_FILLED
from tests.bench.topologies import Row, failures


def row(nodes, way, predicted_s, measured_s=None, outside=0):
    measured_s = predicted_s * 1.1 if measured_s is None else measured_s
    return Row(
        nodes, way, "uplink", predicted_s, measured_s, measured_s / predicted_s, outside, int(outside * 1.02), 1.0
    )


AS_PREDICTED = [
    row(4, EACH_FROM_HUB, 16.0, outside=400),
    row(4, SHARDED_EXCHANGE, 13.0, outside=100),
    row(4, STORE_FILLED, 14.5),
    row(16, EACH_FROM_HUB, 64.0, outside=1600),
    row(16, SHARDED_EXCHANGE, 14.0, outside=100),
    row(16, STORE_FILLED, 28.0),
    row(16, SHARDED_PULL, 29.0, outside=100),
]


@pytest.mark.parametrize(
    ("place", "changes", "said"),
    [
        (0, {}, None),
        (3, {"ratio": 1.6}, "each-from-hub on 16: 1.6 times"),
        (3, {"ratio": 0.7}, "each-from-hub on 16: 0.7 times"),
        (4, {"outside_measured_bytes": 200}, "sharded-exchange on 16: 200 bytes from outside"),
        (4, {"outside_measured_bytes": 50}, "sharded-exchange on 16: 50 bytes from outside"),
        (4, {"measured_s": 31.0}, "on 16: sharded-exchange was not faster than store-filled"),
        (4, {"measured_s": 22.0}, "exchange grew 1.54 times, predicted 1.08"),
        # too close to each other to be held to an order
        (6, {"measured_s": 29.5}, None),
        (2, {"measured_s": 14.0}, None),
    ],
)
def test_what_is_not_as_predicted_is_found(place, changes, said):
    rows = list(AS_PREDICTED)
    rows[place] = replace(rows[place], **changes)
    found = failures(rows)
    assert (not found) if said is None else any(said in line for line in found)
