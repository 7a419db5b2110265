# SPDX-License-Identifier: Apache-2.0
"""What requests do: one file for each operation, listed in `registry.py`.

`base.py` says what an operation is made of. `options.py` is plain data that the command line reads
too.
"""
