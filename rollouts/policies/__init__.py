# SPDX-License-Identifier: Apache-2.0
"""Policies, by name or as objects.

policy.py          what a policy is; functions, coroutine functions, classes
random_policy.py   at random, by the actions' schema
chat_policy.py     a model behind an OpenAI-compatible endpoint
"""
