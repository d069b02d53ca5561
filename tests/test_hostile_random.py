"""Random damage in any file of the user's is read, skipped or refused in one sentence, never a traceback."""

import hostile_random
import pytest
from hostile_random import READERS

# the tries of each reader in `make test`, in `make test-hostile`, and there with models; those of one process
FEW, MANY, SLOW, GROUP = 20, 2000, {"model folders": 80, "tokenizer folders": 200}, 250


@pytest.mark.parametrize("name", [name for name in READERS if name not in SLOW])
def test_a_few_spoilt_files_are_read_or_refused(attacked, name):
    outcome = attacked.run(hostile_random.tried, name, 0, FEW)
    assert outcome.error == ""
    assert sum(outcome.value.values()) == FEW


@pytest.mark.hostile
@pytest.mark.parametrize("name", READERS)
def test_many_spoilt_files_are_read_or_refused(attacked, name):
    # a model takes longer, and its library to be loaded
    tries, group = SLOW.get(name, MANY), 50 if name in SLOW else GROUP
    # several processes, because each may use its seconds of processor time
    for first in range(0, tries, group):
        outcome = attacked.run(hostile_random.tried, name, first, min(group, tries - first))
        assert outcome.error == ""
