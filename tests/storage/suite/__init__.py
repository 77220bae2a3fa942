"""The promises of the Store protocol as tests that run on any backend.

A test module imports everything from here and defines the fixture `backend`: a `tests.support.stores.Backend` with the
function that opens the store. Its mapping `DIFFERENCES` (promise to reason) has the promises that it does not keep.
"""

from tests.storage.suite.conditions import *  # noqa: F403
from tests.storage.suite.locks import *  # noqa: F403
from tests.storage.suite.logs import *  # noqa: F403
from tests.storage.suite.model import *  # noqa: F403
from tests.storage.suite.objects import *  # noqa: F403
from tests.storage.suite.pieces import *  # noqa: F403
from tests.storage.suite.watching import *  # noqa: F403
