# SPDX-License-Identifier: Apache-2.0
"""The folder of a rollout: files that exist once they have their name.

    episodes/000042.jsonl          a large episode: a line for each step, a line for the last
                                   observation, and a line with its totals and checksum
    episodes/group-000040/…        the episodes of a group, if one of them is large
    packs/00000.jsonl              many small episodes, unchanged; the last line has an index
    packs/00000.packing            a pack whose episodes may still be in smaller files, too
    damaged/                       files that other programs have cut or changed
    .files                         a line for each file that was made, with its episodes
    .unfinished/                   files that are being written; emptied by the next writer

The flow, by thread:

    event loop (writer.py)                      threads of the writer
    ──────────────────────                      ─────────────────────
    put_step ─▶ EpisodeFile, in memory ─256 kB▶ append to .unfinished/N       (rows.py)
    finish ─▶ ended ─half a second─▶ commit ──▶ small: one pack; large: each
                                                written, renamed; folder synced
                            └─ small files ───▶ concatenate, rename           (packs.py)
    a later writer, a reader ◀──────────────── names of files, indexes        (readers.py)

The event loop never waits for a disk. The writer of a step waits while its episode is written, or
while memory holds too much. The lines are in `rows.py`, durable operations in `disk.py`.

Exactly once: an episode exists from the rename of its file, its pack, or the folder of its group.
Only a listing of the folder shows which episodes exist. Small episodes are in memory until they end
and then go into a common pack, because creating, renaming and later removing a file for each one
takes milliseconds on a busy disk. Small files, including packs, are packed when a rollout has
ended, or has made 4,096 files.

Durability: content is written to the medium before its file is renamed, and one `fsync` of the
folder follows the renames of a commit. On a file system with a journal (ext4, XFS) a name is never
durable before its content.

Failure cases:

    the worker is killed          files without a final name are in `.unfinished/`, and are played
                                  again: about the last half second of finished episodes
      between two renames         each episode (or group) of a commit exists, or is played again
      while files are packed      the pack is in `.unfinished/`; the files are untouched
      after `N.packing` exists    the pack counts. This writer or the next one removes smaller files
                                  with its episodes before it names the pack `N.jsonl`, so that a
                                  pattern such as `**/*.jsonl` never finds an episode twice, and our
                                  own reader, which prefers packs, never misses one
    power is lost                 as when the worker is killed
    the disk is full              the rollout ends with an error; finished files stay. Files whose
                                  pack does not fit stay as they are
    a second writer               is refused: the first holds a lock on `.lock` until it exits
    resume with other settings    is refused by `rollout.json` (`run.claim_folder`)
    a file is removed, cut or     the writer sets it aside when it ends, or the next one, which
    changed                       reads all files, when it begins; the episodes are played again
                                  (`damage.py`). `Rollouts.verify` finds the file by its checksum,
                                  and readers report damage in what they read
    failed episodes               are written like others where they are kept (`--keep-failed`)
    read while it is written      a reader has the episodes that existed when it listed the folder.
                                  It lists again if packs have changed meanwhile, and searches for
                                  an episode again if its file has gone into a pack

A large group is a renamed folder, because one file would need another copy of its members.
"""
