# SPDX-License-Identifier: Apache-2.0
"""`benchmark`: every step waits as long as its action says; scaling is measured with it.

behaviour.py      its behaviour and its fields, on pydantic alone
environment.py    on our base classes: `openenv launch benchmark`
"""
