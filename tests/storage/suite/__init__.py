"""What every store promises, as tests that any store can be run against.

A module of tests imports everything from here and defines the fixture `place`: a `tests.support.stores.Place` with the
function that opens the store. A mapping `DIFFERENCES` (promise to reason) leaves out what the store does not give.
"""

from tests.storage.suite.conditions import *  # noqa: F403
from tests.storage.suite.locks import *  # noqa: F403
from tests.storage.suite.logs import *  # noqa: F403
from tests.storage.suite.model import *  # noqa: F403
from tests.storage.suite.objects import *  # noqa: F403
from tests.storage.suite.pieces import *  # noqa: F403
from tests.storage.suite.watching import *  # noqa: F403
