# SPDX-License-Identifier: Apache-2.0
"""Policies, by name or as objects.

policy.py          the interface; functions, coroutine functions and classes as policies
random_policy.py   random actions, by the actions' schema
chat_policy.py     a model behind an OpenAI-compatible endpoint
"""
