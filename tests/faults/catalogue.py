"""All faults, by name."""

from tests.faults.experts import MIXTURES
from tests.faults.fault import Fault
from tests.faults.reductions import REDUCTIONS
from tests.faults.sequences import SEQUENCES
from tests.faults.states import STATES

FAULTS: tuple[Fault, ...] = (*REDUCTIONS, *SEQUENCES, *STATES, *MIXTURES)
