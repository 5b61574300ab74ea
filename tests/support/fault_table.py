"""Every fault that a run must survive, and the tests that show it; `tests/test_fault_table.py` keeps this true.

A fault that does not apply has a reason in place of tests. Tests are named `file::function`.
"""

from typing import NamedTuple


class Row(NamedTuple):
    """One fault: what happens, what must hold, where it is shown."""

    fault: str
    holds: str
    tests: tuple[str, ...] = ()
    reason: str = ""


FAULTS: tuple[Row, ...] = (
    Row(
        "SIGKILL at each step between evaluating and acknowledging",
        "acknowledged chunks stay; at most what was queued and in flight is evaluated again",
        (
            "test_simulation.py::test_ten_thousand_schedules_keep_every_promise",
            "test_write.py::test_fail_at_every_operation",
            "test_local_store.py::test_killed_in_the_middle_of_writing",
            "test_resume.py::test_stopped_after_every_number_of_chunks",
            "test_resume.py::test_killed_again_and_again_and_continued_at_other_world_sizes",
        ),
    ),
    Row(
        "SIGKILL at random moments",
        "the bits of an undisturbed run, two evaluations lost per kill",
        ("test_campaign.py::test_killed_at_random_against_a_store_that_fails",),
    ),
    Row(
        "SIGTERM, SIGINT, SIGUSR1, once and twice",
        "exit code 75, no finished chunk lost, one line says what to run",
        ("test_preemption.py::test_a_signal_in_the_middle_of_a_chunk",),
    ),
    Row(
        "SIGTERM during a retry's sleep",
        "exit within the grace budget, finished chunks in the spool",
        (
            "test_preemption.py::test_a_signal_while_the_store_does_not_answer",
            "test_retry.py::test_stop_ends_a_long_wait",
        ),
    ),
    Row(
        "SIGTERM to the whole process group, loading threads included",
        "no rank crashes before it has drained",
        (
            "test_preemption.py::test_a_signal_in_the_middle_of_a_chunk",
            "test_nproc.py::test_launchers_that_are_stopped_killed_and_lose_a_rank",
        ),
    ),
    Row(
        "a launcher ends its ranks after 30 s while one is blocked",
        "a blocked rank leaves by itself within its grace budget",
        (
            "test_preemption.py::test_an_evaluation_that_does_not_end",
            "test_preempt.py::test_a_main_thread_stuck_in_one_call_is_ended_within_the_grace_budget",
            "test_nproc.py::test_launchers_that_are_stopped_killed_and_lose_a_rank",
        ),
    ),
    Row(
        "a launcher is killed",
        "its ranks end by themselves, with what they had finished stored",
        ("test_nproc.py::test_launchers_that_are_stopped_killed_and_lose_a_rank",),
    ),
    Row(
        "a rank is stopped past the takeover of its chunks, then continued, before and after the seal",
        "both evaluations stored, one counted, the same number",
        (
            "test_zombie.py::test_a_rank_that_wakes_up_after_the_end",
            "test_zombie.py::test_a_rank_that_wakes_up_before_the_end",
        ),
    ),
    Row(
        "PUT carried out, acknowledgement lost; on `run.json` too",
        "recognised as our own, nothing counted twice",
        (
            "test_remote.py::test_create_survives",
            "test_remote.py::test_lost_answer_of_anothers_object",
            "support/contract.py::test_create_again_is_our_own_write",
            "test_fail_at_each_operation.py::test_fail_at_each_operation",
        ),
    ),
    Row("409 conflict twice", "tried again", ("test_remote.py::test_create_survives",)),
    Row(
        "a burst of SlowDown",
        "tried again, requests bounded, random waits",
        (
            "test_remote.py::test_create_survives",
            "test_remote.py::test_requests_below_are_bounded",
            "test_retry.py::test_requests_are_bounded",
        ),
    ),
    Row(
        "503 for good",
        "evaluation goes on into the spool, exit code 75, `upload-spool` completes",
        ("test_preemption.py::test_a_store_that_is_gone_for_good", "test_write.py::test_a_store_gone_for_good"),
    ),
    Row(
        "500 once; 400, 401, 403, missing bucket",
        "tried again; one request and a hint",
        ("test_remote.py::test_create_survives", "test_remote.py::test_what_does_not_pass_is_one_request"),
    ),
    Row(
        "an expired token",
        "the client is rebuilt once",
        (
            "test_retry.py::test_expired_credentials_rebuild_the_client_once",
            "test_remote.py::test_credentials_that_stay_expired",
        ),
    ),
    Row(
        "a clock that differs too much",
        "one request, a clear sentence",
        (
            "test_retry.py::test_clock_skew_has_its_own_sentence",
            "test_remote.py::test_what_does_not_pass_is_one_request",
        ),
    ),
    Row(
        "a black hole, before `100 Continue`",
        "the deadline fires; the grace budget holds",
        (
            "test_remote.py::test_black_hole_ends_at_the_deadline",
            "test_preemption.py::test_a_signal_while_the_store_does_not_answer",
            "test_write.py::test_close_keeps_its_deadline_with_a_black_holed_store",
        ),
    ),
    Row(
        "a connection reset in the middle of a body, an answer cut off",
        "an object is absent or whole",
        ("test_remote.py::test_create_survives", "test_remote.py::test_torn_answer_is_read_again"),
    ),
    Row(
        "a segment torn at any length",
        "set aside, its chunk evaluated again",
        (
            "test_reduce.py::test_a_torn_segment_is_noticed",
            "test_codec.py::test_every_truncation_is_seen",
            "test_resume.py::test_a_spoilt_segment_is_evaluated_again",
        ),
    ),
    Row(
        "any single bit flipped",
        "set aside, its chunk evaluated again",
        (
            "test_reduce.py::test_every_flipped_bit_is_noticed",
            "test_codec.py::test_every_flipped_bit_is_seen",
            "test_resume.py::test_a_spoilt_segment_is_evaluated_again",
        ),
    ),
    Row(
        "a segment renamed, doubled, of another run or plan; trailing bytes; a decompression bomb",
        "named, set aside, never counted",
        (
            "test_reduce.py::test_what_does_not_belong_is_named_and_changes_nothing",
            "test_codec.py::test_nothing_may_follow_the_frame",
            "test_codec.py::test_bomb_that_lies_about_its_size",
            "test_resume.py::test_a_spoilt_segment_is_evaluated_again",
        ),
    ),
    Row(
        "the same records in a segment and in a roll-up",
        "counted once",
        (
            "test_ledger.py::test_a_rollup_stands_for_what_it_covers",
            "test_ledger.py::test_a_rollup_that_comes_later_replaces_what_was_read",
        ),
    ),
    Row(
        "a valid copy of a chunk with another number",
        "a conflict that a third evaluation settles; never averaged",
        (
            "test_judge.py::test_a_copy_that_disagrees_is_a_conflict_and_never_averaged",
            "test_judge.py::test_a_third_evaluation_decides",
            "test_reduce.py::test_a_conflicting_copy_is_refused",
        ),
    ),
    Row(
        "a segment missing in the middle",
        "incomplete, evaluated again",
        (
            "test_reduce.py::test_a_missing_segment_is_not_complete",
            "test_resume.py::test_a_spoilt_segment_is_evaluated_again",
        ),
    ),
    Row(
        "a listing that is stale",
        "incomplete or right, never wrong",
        (
            "test_simulation.py::test_ten_thousand_schedules_keep_every_promise",
            "test_schedule.py::test_an_acknowledged_record_that_is_not_accepted_is_tried_once_more",
            "test_ledger.py::test_an_object_that_is_listed_but_gone_is_tried_twice",
        ),
    ),
    Row(
        "a listing that takes longer than its interval",
        "the work goes on",
        ("test_slow_listing.py::test_work_goes_on_though_listing_takes_longer_than_its_interval",),
    ),
    Row(
        "disk full, quota, read-only, no descriptors, a file-size limit",
        "a clear sentence, nothing partial visible",
        (
            "test_local_store.py::test_failed_writes",
            "test_local_store.py::test_too_many_open_files",
            "test_local_store.py::test_file_size_limit",
        ),
    ),
    Row(
        "a fork while the store is in use",
        "no hang",
        ("test_remote.py::test_client_is_made_anew_after_a_fork",),
    ),
    Row(
        "a slow store, a full queue",
        "bounded memory, no deadlock",
        (
            "test_write.py::test_submit_waits_while_the_queue_is_full",
            "test_write.py::test_memory_does_not_grow_with_the_number_of_chunks",
        ),
    ),
    Row(
        "one rank killed, as when memory is out",
        "the others finish its chunks; under a launcher the next run does",
        (
            "test_zombie.py::test_a_rank_that_dies",
            "test_nproc.py::test_launchers_that_are_stopped_killed_and_lose_a_rank",
        ),
    ),
    Row(
        "a rank dies before or in the collective, or comes late",
        "the others leave in time; the merge gives the result",
        (
            "test_collective.py::test_the_others_leave_in_time_and_know_who_is_missing",
            "test_collective.py::test_a_late_rank_does_not_wait",
        ),
    ),
    Row(
        "ranks with different numbers of chunks, none among them",
        "no hang",
        ("test_zombie.py::test_ranks_without_chunks",),
    ),
    Row(
        "another world size after each kill",
        "the same bits",
        ("test_resume.py::test_killed_again_and_again_and_continued_at_other_world_sizes",),
    ),
    Row(
        "eight first starts at once",
        "one plan and identity; all agree or exit with 2",
        ("test_nproc.py::test_eight_starters_make_one_run",),
    ),
    Row(
        "weights, tokenizer, corpus, protocol, context, dtype changed, one at a time",
        "exit code 2 with the field; nothing reused",
        ("test_resume.py::test_a_changed_input_is_refused_by_name",),
    ),
    Row(
        "a loss that is not finite, once and always",
        "evaluated again; reported, never dropped",
        (
            "test_judge.py::test_a_finite_copy_replaces_a_non_finite_one",
            "test_reduce.py::test_a_loss_that_stays_non_finite_is_refused",
            "test_audit.py::test_a_loss_that_is_never_finite_ends_the_search",
        ),
    ),
    Row(
        "a device that is biased, or wrong in some chunks",
        "found by audits, convicted, its work done again",
        ("test_audit.py::test_a_faulty_device_is_found_and_its_work_done_again",),
    ),
    Row(
        "concurrent reducers and writers",
        "the sealed value is equal or the run is not complete",
        (
            "test_nproc.py::test_eight_starters_make_one_run",
            "test_reduce.py::test_a_seal_is_created_once",
            "test_reduce.py::test_other_sums_never_replace_a_seal",
        ),
    ),
    Row(
        "a compactor beside readers and writers",
        "readers never miss what was there",
        reason="nothing is compacted, moved or deleted: roll-ups are further segments of the worker itself",
    ),
    Row(
        "a power cut that loses what was not synced",
        "acknowledged chunks survive",
        (
            "test_local_store.py::test_order_that_survives_a_power_cut",
            "support/contract.py::test_readers_see_whole_objects_only",
        ),
    ),
    Row(
        "workers of a data loader that get the signal too",
        "no crash before the drain",
        reason="chunks are loaded by threads of the worker; there are no loader processes",
    ),
    Row(
        "a rank's storage error while its peers wait in a barrier",
        "nobody is stranded",
        reason="replicas exchange nothing while they evaluate, and meet only when the run is complete",
    ),
)
