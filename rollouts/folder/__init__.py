# SPDX-License-Identifier: Apache-2.0
"""The folder that episodes are written to and read from; `layout.py` says what lies in it.

writing     writer.py ─▶ output.py ─▶ spool.py (unfinished) ─▶ part.py (finished) ─▶ columnar.py
                         manifest.py: what exists; disk.py: files, made durable
reading     readers.py ─▶ rows.py ─▶ lines.py (JSONL), column_files.py (Parquet, Arrow)
                         open_files.py: files that may still be written
                         hugging_face.py: all of it as a `datasets.Dataset`
"""
