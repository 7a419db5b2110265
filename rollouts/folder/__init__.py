# SPDX-License-Identifier: Apache-2.0
"""The folder of a rollout: files that exist once they have their name.

    episodes/000042.jsonl          a large episode: a line for each step, a line for what was
                                   observed last, and a line with its totals and checksum
    episodes/group-000040/…        the episodes of a group, where one of them is large
    packs/00000.jsonl              many small episodes, as they were; the last line has an index
    packs/00000.packing            a pack whose episodes may lie in smaller files still
    damaged/                       files that others have cut or changed
    .files                         a line for each file that was made, with its episodes
    .unfinished/                   files that are being written; emptied by the next writer

The flow, and who writes what:

    event loop (writer.py)                      threads of the writer
    ──────────────────────                      ─────────────────────
    put_step ─▶ EpisodeFile, in memory ─256 kB▶ append to .unfinished/N       (rows.py)
    finish ─▶ ended ─half a second─▶ commit ──▶ small: one pack; large: each
                                                written, renamed; folder synced
                            └─ small files ───▶ concatenate, rename           (packs.py)
    a later writer, a reader ◀──────────────── names of files, indexes        (readers.py)

The event loop never waits for a disk. The writer of a step waits while its episode is written, or
while too much is held in memory. The lines are in `rows.py`, durable operations in `disk.py`.

Exactly once: an episode exists from the moment that its file is renamed, its pack, or the folder of
its group. What exists is found by listing the folder; nothing else says so. What was never on disk,
because it is small, goes into a pack with what ended about then, since to make, rename and later
remove a file for each small episode takes milliseconds on a busy disk. Small files, also packs, are
packed when a rollout has ended, or has made 4,096 files.

Durability: content is written to the medium before its file is renamed, and one `fsync` of the
folder follows the renames of a commit. On a file system with a journal (ext4, XFS) a name is never
durable before its content.

Failure cases:

    the worker is killed          what was not renamed is in `.unfinished/`, and is played again:
                                  about the last half second of finished episodes
      between two renames         each episode (or group) of a commit is there, or is played again
      while files are packed      the pack lies in `.unfinished/`; the files are untouched
      after `N.packing` is there  the pack counts. Smaller files with its episodes are removed, by
                                  the next writer if need be, before it is called `N.jsonl`: so a
                                  pattern such as `**/*.jsonl` never finds an episode twice, and our
                                  own reader, which prefers packs, never misses one
    power is lost                 as when the worker is killed
    the disk is full              the rollout ends with an error; what has its name stays. Files
                                  whose pack does not fit stay as they are
    a second writer               is refused: the first holds a lock on `.lock`, also after a crash
    resume with other settings    is refused by `rollout.json` (`run.claim_folder`)
    a file is removed, cut or     the writer sets it aside, and its episodes are played again
    changed                       (`damage.py`): when it ends, and the next one when it begins,
                                  which reads all files. `Rollouts.verify` finds it by its checksum,
                                  and reading reports what it meets
    failed episodes               are written like others where they are kept (`--keep-failed`)
    read while it is written      a reader has the episodes that existed when it listed the folder.
                                  It lists again where packs have changed meanwhile, and looks for
                                  an episode again when its file has gone into a pack

A large group is a folder that is renamed, not one file: its members would be copied once more.
"""
