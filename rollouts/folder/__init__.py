# SPDX-License-Identifier: Apache-2.0
"""The folder that episodes are written to and read from. `layout.py` says what lies in it.

writing     writer.py ─▶ output.py ─▶ spool.py (under way) ─▶ part.py (finished) ─▶ columnar.py
                         manifest.py: what exists for certain; disk.py: made durable
                         asides.py: last observations of episodes that wait for their group
reading     readers.py ─▶ rows.py ─▶ lines.py (JSONL), column_files.py (Parquet, Arrow)
                         open_files.py: files that may still be written
                         hugging_face.py: all of it as a `datasets.Dataset`
"""
