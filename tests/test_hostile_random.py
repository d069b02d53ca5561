"""Random damage in any file of the user's is read, skipped or refused in one sentence, never a traceback."""

import hostile_random
import pytest
from hostile_random import READERS

# the tries of each reader in `make test`, and in `make test-hostile` where they take about a second for a thousand
FEW, MANY, SLOW = 20, 2000, {"model folders": 200, "tokenizer folders": 500}


@pytest.mark.parametrize("name", [name for name in READERS if name not in SLOW])
def test_a_few_spoilt_files_are_read_or_refused(attacked, name):
    outcome = attacked.run(hostile_random.tried, name, 0, FEW)
    assert outcome.error == ""
    assert sum(outcome.value.values()) == FEW


@pytest.mark.hostile
@pytest.mark.parametrize("name", READERS)
def test_many_spoilt_files_are_read_or_refused(attacked, name):
    tries = SLOW.get(name, MANY)
    # several processes, because each may use its seconds of processor time
    for first in range(FEW, tries, 100):
        outcome = attacked.run(hostile_random.tried, name, first, min(100, tries - first))
        assert outcome.error == ""
