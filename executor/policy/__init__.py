# SPDX-License-Identifier: Apache-2.0
"""Pure decisions of the executor: plain values in, a small value out."""
