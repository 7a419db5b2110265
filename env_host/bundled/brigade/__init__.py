# SPDX-License-Identifier: Apache-2.0
"""`brigade`: people sing together, each hearing those ahead of them; many clients, one state.

    opus.py         Opus frames to PCM and back; stateful, so it stays with the session
    mixing.py       the mixing buffer and the song: the state process's, numpy alone
    environment.py  the environment: decode, `world.mix`, encode

After https://github.com/jeffkaufman/bucket-brigade. Needs `pip install '.[brigade]'`.
"""

import os
from importlib.util import find_spec

from ...errors import LoadError

if not (find_spec("av") and find_spec("numpy")):
    from ....system.files.installation import install_command

    raise LoadError(f"the brigade needs a codec and numpy: {install_command('brigade')}")

# Otherwise numpy starts a thread for each core, for algebra that is not done here. A process with
# threads cannot be forked, so that every shard would have to import all of this for itself.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
