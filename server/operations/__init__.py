# SPDX-License-Identifier: Apache-2.0
"""The operations that requests run: a class for each, listed in `registry.py`.

`base.py` says what an operation is made of; their options are in `schema/operation_options.py`.
`testing/` has the checks of `environment_test.py`.
"""
