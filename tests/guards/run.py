"""Takes each invariant's guard out of a copy of the tree and shows the test that turns red.

A test that stays green without the guard that it is about proves nothing; this finds it. Run by `make test-guards`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = ("flows", "tasks", "manifests", "infra", "tests", "pyproject.toml")
TIMEOUT_S = 180
WHOLE_TIMEOUT_S = 900
JOBS = 2


@dataclass(frozen=True)
class Guard:
    """One guard: the text that is it, the text without it, and the tests that must turn red."""

    invariant: str
    what: str
    file: str
    there: str
    without: str
    tests: tuple[str, ...]


GUARDS = (
    Guard(
        "I1",
        "bytes are compared with the lock before they get their final name",
        "tasks/node/verified_file.py",
        "            check_content(path, expected, writer.size_bytes, writer.sha256)\n",
        "",
        ("tests/unit/test_stage.py::test_wrong_bytes_twice_fail_and_name_node_and_file",),
    ),
    Guard(
        "I1",
        "no path of a checkpoint leaves its directory or takes a name of ours",
        "tasks/core/lock.py",
        "        check_relative_path(file.path)\n",
        "",
        ("tests/unit/test_lock.py::test_a_wrong_file_is_refused",),
    ),
    Guard(
        "I1",
        "no two paths of a checkpoint are one on some file systems",
        "tasks/core/lock.py",
        "    check_paths_together(file.path for file in ordered)\n",
        "",
        ("tests/unit/test_step_locking.py::test_a_revision_that_cannot_be_right_is_refused",),
    ),
    Guard(
        "I1",
        "a small file is compared with its blob id before it gets a sha256 of ours",
        "tasks/steps/locking.py",
        "        if got != expected:\n",
        "        if False:\n",
        ("tests/unit/test_step_locking.py::test_a_small_file_that_is_not_what_the_hub_lists_is_refused",),
    ),
    Guard(
        "I1",
        "a header holds the tensors that the index says",
        "tasks/steps/locking.py",
        "            check_names(header, index)\n",
        "            pass\n",
        (
            "tests/unit/test_step_locking.py::test_every_shard_with_a_wrong_header_of_the_right_sha_is_found_and_named",
            "tests/unit/test_step_locking.py::test_a_checkpoint_in_which_index_headers_and_sizes_disagree_is_refused",
        ),
    ),
    Guard(
        "I1",
        "a shard is as long as its header says",
        "tasks/core/safetensors.py",
        "    if told != size_bytes:\n",
        "    if False:\n",
        ("tests/unit/test_safetensors.py::test_what_the_formats_own_reader_refuses_is_refused",),
    ),
    Guard(
        "I1",
        "a wrong header is the checkpoint's only if it comes twice the same",
        "tasks/steps/locking.py",
        "            if str(error) == first:\n                raise\n",
        "            raise\n",
        ("tests/unit/test_step_locking.py::test_a_hub_that_does_not_answer_or_not_twice_the_same_is_unavailable",),
    ),
    Guard(
        "I1",
        "no second lock is accepted for a commit",
        "tasks/steps/acceptance.py",
        "    _check_same(store, lock)\n",
        "",
        (
            "tests/unit/test_step_acceptance.py::test_a_hub_that_says_something_else_later_is_not_believed",
            "tests/unit/test_step_acceptance.py::test_two_runs_at_once_that_saw_different_hubs_do_not_both_go_on",
        ),
    ),
    Guard(
        "I1",
        "an accepted lock is that of the commit that was asked for",
        "tasks/steps/acceptance.py",
        "    if (lock.repo, lock.revision) != (repo, revision):\n",
        "    if False:\n",
        ("tests/unit/test_step_acceptance.py::test_a_record_that_names_the_lock_of_another_commit_is_not_believed",),
    ),
    Guard(
        "I1",
        "where a site names a key, an unsigned lock goes no further",
        "tasks/steps/acceptance.py",
        "    signed_by = require_signature(ports.store, lock, ports.lock_key)\n",
        '    signed_by = ""\n',
        ("tests/unit/test_signatures.py::test_where_a_site_names_a_key_an_unsigned_lock_is_refused_and_not_accepted",),
    ),
    Guard(
        "I1",
        "a signature is checked with the key",
        "tasks/steps/signatures.py",
        "    if not key.verifies(found.signed_bytes, found.signature):\n",
        "    if False:\n",
        ("tests/unit/test_signatures.py::test_a_signature_that_only_calls_itself_by_the_key_is_refused",),
    ),
    Guard(
        "I1",
        "a signature is over this lock, not over an older one of the same files",
        "tasks/core/attestation.py",
        '    if digest not in ("", lock.digest):\n',
        "    if False:\n",
        ("tests/unit/test_attestation.py::test_the_statement_of_another_revision_with_the_same_files_is_refused",),
    ),
    Guard(
        "I1",
        "a blob of a pull that still runs counts only with the puller's word for it",
        "tasks/node/arrivals.py",
        """            if f"blobs/{file.sha256}.ok" in sizes and sizes""",
        """            if sizes""",
        ("tests/unit/test_arrivals.py::test_a_blob_without_the_pullers_word_or_with_another_size_is_not_taken",),
    ),
    Guard(
        "I1",
        "a wrong file that is found does not keep its name",
        "tasks/node/stager.py",
        """            self._quarantined(file.path, f"sha256 {sha256}", "wrong bytes", sha256, file.sha256)\n""",
        "",
        ("tests/unit/test_stage_disk.py::test_no_wrong_file_stands_under_its_name_while_its_replacement_is_fetched",),
    ),
    Guard(
        "I1",
        "a staged directory is closed for writing",
        "tasks/node/stager.py",
        "        close_for_writing(self._directory)\n",
        "",
        ("tests/unit/test_stage_disk.py::test_a_staged_directory_is_closed_and_opened_again_for_whoever_stages",),
    ),
    Guard(
        "I1",
        "stagers of two locks take turns on a node",
        "tasks/node/stager.py",
        "                directory_lock.hold_node(self._root, self._lock.digest, lock_wait_s, self._stop),\n",
        "",
        (
            "tests/unit/test_stage_disk.py"
            "::test_stagers_of_two_locks_take_turns_so_that_each_sees_what_the_other_has_left",
        ),
    ),
    Guard(
        "I1",
        "flows of two locks do not start Jobs on one node at the same time",
        "tasks/steps/staging.py",
        "        with holder.holding(nodes, _BUSY_WAIT_S, watch):\n",
        "        if True:\n",
        (
            "tests/unit/test_node_holder.py"
            "::test_two_locks_that_come_at_once_never_have_jobs_on_a_node_at_the_same_time",
        ),
    ),
    Guard(
        "I1",
        "the Job of a flow that died keeps another lock out",
        "tasks/steps/node_holder.py",
        " or (who := self._writer(node)):",
        ":",
        ("tests/unit/test_node_holder.py::test_a_flow_that_died_leaves_its_job_at_work_and_that_is_waited_for",),
    ),
    Guard(
        "I5",
        "a pull that fails ends the stagers that wait for it",
        "tasks/steps/staging.py",
        "            end_jobs(ports, jobs)\n",
        "            pass\n",
        ("tests/unit/test_delivery.py::test_a_pull_that_fails_ends_the_stagers_and_is_what_is_told",),
    ),
    Guard(
        "I1",
        "a file that another program wrote is compared with the lock before it gets its name",
        "tasks/node/verified_file.py",
        "        check_content(path, expected, size_bytes, sha256)\n",
        "",
        ("tests/contract/test_dragonfly.py::test_whatever_it_says_nothing_wrong_gets_a_name_and_nothing_is_left",),
    ),
    Guard(
        "I1",
        "a file that has a second name is not taken over: who has that may write to it",
        "tasks/node/verified_file.py",
        "        if before.st_nlink != 1:\n",
        "        if False:\n",
        ("tests/contract/test_dragonfly.py::test_whatever_it_says_nothing_wrong_gets_a_name_and_nothing_is_left",),
    ),
    Guard(
        "I1",
        "what an engine has left running is ended before its file is read",
        "tasks/node/dragonfly.py",
        "                os.killpg(child.pid, signal.SIGKILL)\n",
        "                pass\n",
        ("tests/contract/test_dragonfly.py::test_what_it_leaves_running_cannot_change_the_file",),
    ),
    Guard(
        "I1",
        "a node serves a file only while it is the one that was verified",
        "tasks/node/shard_server.py",
        "        if not same or not stat",
        "        if not stat",
        ("tests/unit/test_shard_server.py::test_a_file_that_is_not_the_verified_one_any_more_is_not_served",),
    ),
    Guard(
        "I6",
        "a node serves nobody without its token",
        "tasks/node/shard_server.py",
        'if not tokens.accepts(_bearer(self.headers.get("Authorization", ""))):',
        "if False:",
        ("tests/unit/test_shard_server.py::test_nobody_is_told_anything_without_the_token",),
    ),
    Guard(
        "I6",
        "a token's time ends",
        "tasks/node/shard_server.py",
        "hmac.compare_digest(token, given) and now < until",
        "hmac.compare_digest(token, given)",
        ("tests/unit/test_shard_server.py::test_a_token_is_good_for_its_time_and_the_next_one_overlaps",),
    ),
    Guard(
        "I6",
        "what Dragonfly's program says is told without secrets",
        "tasks/node/dragonfly.py",
        '            text = text.replace(secret, "***") if secret else text\n',
        "            pass\n",
        ("tests/contract/test_dragonfly.py::test_whatever_it_says_nothing_wrong_gets_a_name_and_nothing_is_left",),
    ),
    Guard(
        "I1",
        "bytes are on the disk before they get their final name",
        "tasks/node/verified_file.py",
        "            writer.sync()\n",
        "",
        ("tests/unit/test_verified_file.py::test_the_order_of_things",),
    ),
    Guard(
        "I1",
        "a final name is on the disk before anybody relies on it",
        "tasks/node/verified_file.py",
        "            found = os.fstat(fd)\n        temp.rename(final)\n        fsync_directory(final.parent)\n",
        "            found = os.fstat(fd)\n        temp.rename(final)\n",
        ("tests/unit/test_verified_file.py::test_the_order_of_things",),
    ),
    Guard(
        "I1",
        "a stream that ends before its length is no end",
        "tasks/adapters/byte_stream.py",
        "        if announced is not None and received != announced:\n",
        "        if False:\n",
        ("tests/contract/store/test_wire_stream.py::test_a_stream_that_is_cut_at_any_tenth_is_no_end",),
    ),
    Guard(
        "I6",
        "a signed request goes to the store alone",
        "tasks/adapters/byte_stream.py",
        "                _refuse_redirect(answer)\n",
        "",
        ("tests/contract/store/test_wire_stream.py::test_a_redirect_is_not_followed",),
    ),
    Guard(
        "I2",
        "every marker is read before a group is created",
        "tasks/steps/rollout.py",
        "    require_markers(ports, subject.lock, nodes)\n",
        "",
        ("tests/unit/test_step_rollout.py::test_no_group_is_created_before_every_marker_is_right",),
    ),
    Guard(
        "I2",
        "a marker is compared with the lock file by file",
        "tasks/steps/staging.py",
        "        check_marker_against_lock(marker, lock, node)\n",
        "",
        ("tests/unit/test_step_staging.py::test_the_barrier_reads_every_marker",),
    ),
    Guard(
        "I2",
        "every engine pod checks the marker on its own disk",
        "manifests/engines/sglang/decode.yaml",
        "command: [python, -m, tasks.node.marker_check]",
        "command: [python, -m, tasks.node.probe]",
        ("tests/unit/test_step_rollout.py::test_every_engine_pod_checks_the_marker_itself_and_wants_a_staged_node",),
    ),
    Guard(
        "I2",
        "engine pods go to staged nodes only",
        "tasks/core/render.py",
        'staged_label(lock.digest): "true", ',
        "",
        ("tests/unit/test_step_rollout.py::test_every_engine_pod_checks_the_marker_itself_and_wants_a_staged_node",),
    ),
    Guard(
        "I2",
        "the deep verification follows no link on a node",
        "tasks/node/verify_files.py",
        "links=False",
        "links=True",
        ("tests/unit/test_marker_check.py::test_right_bytes_behind_a_link_are_not_right_on_a_node",),
    ),
    Guard(
        "I2",
        "a file that changes while it is read is not called right",
        "tasks/node/checkout.py",
        "    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):\n",
        "    if False:\n",
        ("tests/unit/test_checkout.py::test_a_file_that_changes_while_it_is_read_is_not_right",),
    ),
    Guard(
        "I3",
        "an older generation does not write the route",
        "tasks/steps/traffic.py",
        "    check_fence(read_route(obj).generation, holder.generation)\n",
        "",
        ("tests/unit/test_step_holder.py::test_an_older_holder_is_fenced_off_by_the_route_alone",),
    ),
    Guard(
        "I3",
        "the lease is renewed before each write",
        "tasks/steps/traffic.py",
        "    holder.renew()\n    backends",
        "    backends",
        ("tests/unit/test_step_holder.py::test_an_older_holder_is_fenced_off",),
    ),
    Guard(
        "I3",
        "who resumes a shift claims the route first",
        "tasks/steps/shifting.py",
        '            self._set_weight(self.state.candidate_percent, "resumed")\n',
        "            pass\n",
        (
            "tests/unit/test_step_holder.py"
            "::test_a_sleeper_whose_write_is_on_its_way_is_fenced_off_by_the_one_who_resumes",
        ),
    ),
    Guard(
        "I3",
        "a weight that a human hand wrote stops the shift",
        "tasks/core/route.py",
        "    check_weights(obj, state)\n",
        "",
        (
            "tests/unit/test_step_traffic.py::test_a_human_hand_is_not_written_over_by_an_abort_either",
            "tests/unit/test_route.py::test_weights_that_nobody_of_us_wrote_are_a_human_hand",
        ),
    ),
    Guard(
        "I4",
        "traffic goes back to the stable set only if that answers",
        "tasks/core/shift.py",
        "    if _answers(stable_probes):\n        return Revert(reason)\n",
        "    return Revert(reason)\n",
        ("tests/unit/test_step_traffic.py::test_stable_that_does_not_answer_gets_nobody_back",),
    ),
    Guard(
        "I4",
        "the safe set is proved by observed requests",
        "tasks/steps/probing.py",
        "    if set(served) != {expected}:\n",
        "    if not served:\n",
        ("tests/unit/test_step_traffic.py::test_a_proof_that_fails_is_said_and_is_still_a_revert",),
    ),
    Guard(
        "I4",
        "an error in the middle of a shift sends users back",
        "tasks/steps/shifting.py",
        "            abort_after(quick, candidate, shift.tried_percent, holder, shift.history, error, come_back)\n",
        "            pass\n",
        (
            "tests/unit/test_step_aborting.py::test_any_error_in_the_middle_of_a_shift_sends_everybody_back",
            "tests/unit/test_step_aborting.py::test_a_cancelled_shift_sends_everybody_back_and_stays_cancelled",
        ),
    ),
    Guard(
        "I4",
        "an abort does not write over what somebody else owns",
        "tasks/steps/shifting.py",
        "isinstance(error, RevertedError) or is_another_hand(error)",
        "isinstance(error, RevertedError)",
        ("tests/unit/test_step_aborting.py::test_what_somebody_else_owns_is_not_written_by_an_abort",),
    ),
    Guard(
        "I4",
        "a step that fails while its candidate has users sends them back",
        "tasks/traffic.py",
        "            _send_back(order, error)\n",
        "            pass\n",
        ("tests/unit/test_traffic_tasks.py::test_a_step_that_fails_while_the_candidate_has_users_sends_them_back",),
    ),
    Guard(
        "I4",
        "a held shift waits for a person",
        "tasks/steps/shifting.py",
        "    if state.candidate == candidate and state.phase == HELD and state.candidate_percent < 100:\n",
        "    if state.phase == state.candidate:\n",
        ("tests/unit/test_step_aborting.py::test_a_held_shift_is_not_taken_up_by_automation",),
    ),
    Guard(
        "I5",
        "a shift is resumed from what the route says",
        "tasks/steps/shifting.py",
        "    if state.candidate == candidate and state.phase in (SHIFTING, HELD):\n",
        "    if state.phase == HELD:\n",
        ("tests/unit/test_step_traffic.py::test_a_death_at_any_call_and_a_second_run_give_the_same_end",),
    ),
    Guard(
        "I5",
        "flows wait for an API server that is away",
        "tasks/order.py",
        "wiring.connect_patiently(",
        "wiring.connect(",
        ("tests/unit/test_wiring.py::test_flows_wait_for_an_api_that_is_away_and_the_command_line_does_not",),
    ),
    Guard(
        "I5",
        "a write whose answer was lost is looked for before its conflict counts as another hand",
        "tasks/steps/patience.py",
        "not contains(there, wanted)",
        "True",
        ("tests/unit/test_step_patience.py::test_a_replacement_whose_answer_was_lost_is_found",),
    ),
    Guard(
        "I5",
        "an API server that has just come back and refuses everybody is doubted",
        "tasks/steps/patience.py",
        "self._clock.now() - doubted_at >= _doubt_s(error)",
        "True",
        ("tests/unit/test_step_patience.py::test_an_api_server_that_comes_back_refuses_everybody_for_a_moment",),
    ),
    Guard(
        "I5",
        "a watch that is held is given up by its own deadline",
        "tasks/adapters/mirror.py",
        "times.window_s + times.grace_s)\n        self",
        "1e6)\n        self",
        ("tests/unit/test_mirror.py::test_a_watch_that_is_held_is_given_up_by_its_own_deadline",),
    ),
    Guard(
        "I5",
        "a bake begins anew after an outage of the API",
        "tasks/steps/shifting.py",
        "            self.state = replace(self.on_route, since=self.ports.clock.now())\n",
        "            pass\n",
        ("tests/unit/test_shift_outages.py::test_a_bake_begins_anew_after_an_outage",),
    ),
    Guard(
        "I3",
        "what a shift decides from what was just seen is not written minutes later",
        "tasks/steps/shifting.py",
        "    quick = replace(ports, cluster=ports.cluster.impatient)\n",
        "    quick = ports\n",
        (
            "tests/unit/test_shift_outages.py"
            "::test_a_step_that_an_outage_met_is_not_taken_after_it_on_what_was_seen_before",
        ),
    ),
    Guard(
        "I3",
        "another's lease is taken only when it was seen unchanged for its duration",
        "tasks/core/lease.py",
        "    if unwatched or not state.expired(now):\n",
        "    if not state.expired(now):\n",
        (
            "tests/unit/test_step_patience.py"
            "::test_who_waits_for_the_lease_does_not_take_it_for_an_outage_that_kept_everybody_from_renewing",
        ),
    ),
    Guard(
        "I8",
        "a router that knows a pod that is gone is put right before smoke",
        "tasks/steps/gating.py",
        "    settle_workers(ports, subject.serving)\n",
        "",
        ("tests/unit/test_step_router_workers.py::test_a_ghost_ends_with_a_new_router_before_smoke",),
    ),
    Guard(
        "I6",
        "a library's words do not get into the ledger",
        "tasks/steps/journal.py",
        'f"The step ended with {type(error).__name__}."',
        'f"The step ended with {error}."',
        ("tests/unit/test_step_journal.py::test_what_a_library_says_never_gets_into_the_ledger",),
    ),
    Guard(
        "I7",
        "no byte of the model goes through a flow",
        "tasks/steps/weights.py",
        "    jobs = render_pull_jobs(",
        '    b"".join(ports.hub.open_file(lock.repo, lock.revision, missing[0].path, 0))\n    jobs = render_pull_jobs(',
        ("tests/unit/test_layout.py::test_no_byte_of_the_model_goes_through_a_flow",),
    ),
    Guard(
        "I8",
        "a verdict without data is inconclusive",
        "tasks/core/gates.py",
        "outcome = FAIL if FAIL in outcomes else PASS if outcomes == {PASS} else INCONCLUSIVE",
        "outcome = FAIL if FAIL in outcomes else PASS",
        ("tests/unit/test_gates.py::test_throughput", "tests/unit/test_gates.py::test_smoke"),
    ),
    Guard(
        "I8",
        "too few probes do not pass",
        "tasks/core/shift.py",
        "    if len(seen.probes) < plan.min_samples:\n",
        "    if not seen.probes:\n",
        ("tests/unit/test_shift.py::test_judge",),
    ),
    Guard(
        "I8",
        "answers are graded by their content",
        "tasks/core/gates.py",
        "    if prompt.contains not in answer.text:\n",
        "    if not answer.text:\n",
        ("tests/unit/test_step_gating.py::test_smoke_that_does_not_pass_is_a_gate_error_with_its_verdict",),
    ),
    Guard(
        "I8",
        "an answer of another set is no answer of the one that was asked",
        "tasks/steps/probing.py",
        "    if not wrong and answer.served_by != serving:\n",
        "    if not wrong and not serving:\n",
        (
            "tests/unit/test_step_aborting.py::test_an_answer_of_another_set_is_a_wrong_answer",
            "tests/unit/test_step_aborting.py::test_a_candidate_whose_probe_route_is_gone_gets_no_more_users",
        ),
    ),
    Guard(
        "I9",
        "the route is replaced only as it was read",
        "tasks/steps/traffic.py",
        '    rendered["metadata"]["resourceVersion"] = obj["metadata"]["resourceVersion"]\n',
        '    newest = ports.cluster.get("HTTPRoute", LIVE_ROUTE) or obj\n'
        '    rendered["metadata"]["resourceVersion"] = newest["metadata"]["resourceVersion"]\n',
        (
            "tests/unit/test_step_holder.py"
            "::test_a_write_that_was_decided_on_an_older_route_is_refused_by_its_resource_version",
        ),
    ),
    Guard(
        "I9",
        "only a context that the site file names is taken",
        "tasks/core/access.py",
        "    if not context or context not in named:\n",
        "    if not context:\n",
        (
            "tests/unit/test_access.py::test_a_context_that_the_site_file_does_not_name_opens_no_connection[more0-status]",
        ),
    ),
    Guard(
        "I9",
        "a cluster shows its uid before anything else is sent to it",
        "tasks/adapters/pinned_api.py",
        "            self._check_uid(_uid_in(answer))\n",
        "",
        ("tests/unit/test_pinned_api.py::test_another_cluster_gets_no_request_but_the_question",),
    ),
    Guard(
        "I9",
        "only roles of ours have their rules put back",
        "tasks/steps/site_setup.py",
        'if there is None or (there["metadata"].get("labels") or {}).get(_MANAGED_BY) != FIELD_MANAGER:\n',
        "if there is None:\n",
        ("tests/unit/test_step_site_setup.py::test_a_role_of_our_name_that_is_not_ours_stays_as_it_is",),
    ),
    Guard(
        "I10",
        "a router that has users is not restarted",
        "tasks/steps/router_workers.py",
        "        if _may_have_users(ports, self._serving):\n",
        "        if False:\n",
        (
            "tests/unit/test_step_router_workers.py::test_a_router_with_users_is_not_restarted",
            "tests/unit/test_step_router_workers.py::test_a_router_whose_route_a_person_wrote_is_not_restarted",
        ),
    ),
    Guard(
        "I9",
        "a site that does not say so is not rehearsed on",
        "flows/console/own_cluster.py",
        "    _refuse_other_sites(site, site_path)\n",
        "",
        ("tests/unit/test_own_cluster.py::test_a_site_that_does_not_say_so_is_not_rehearsed_on",),
    ),
    Guard(
        "I10",
        "the rollback target stays until its hold is over",
        "tasks/steps/retirement.py",
        "        _check_hold(ports, state)\n",
        "",
        ("tests/unit/test_step_promotion.py::test_the_old_set_stays_until_its_hold_is_over",),
    ),
    Guard(
        "I10",
        "a set that serves under another release's name is not deleted",
        "tasks/steps/retirement.py",
        'return "" if serving in stays else serving',
        "return serving",
        ("tests/unit/test_step_promotion.py::test_a_release_whose_pods_a_newer_policy_serves_with_is_not_retired",),
    ),
    Guard(
        "I10",
        "the hold of an earlier promotion of the same release says nothing",
        "tasks/steps/receipts.py",
        'return promoted if promoted.data.get("promotion") == live.get("promotion") else None',
        "return promoted",
        ("tests/unit/test_step_approval.py::test_a_promotion_back_that_died_is_not_taken_for_the_first_one",),
    ),
    Guard(
        "I8",
        "a gate speaks for the pods that it was measured on and for no others",
        "tasks/steps/approval.py",
        '        if done[gate].data.get("pods") != pods:\n',
        '        if "pods" not in done[gate].data:\n',
        ("tests/unit/test_step_approval.py::test_pods_that_started_again_since_they_were_gated_cannot",),
    ),
    Guard(
        "I8",
        "a gate speaks for the policy that it judged by and for no other",
        "tasks/steps/approval.py",
        '        if done[gate].data.get("policy") != release.policy_digest:\n',
        '        if "policy" not in done[gate].data:\n',
        ("tests/unit/test_step_approval.py::test_each_gate_is_of_this_policy_and_of_these_pods",),
    ),
    Guard(
        "I8",
        "a policy without limits and without a baseline does not pass",
        "tasks/core/gates.py",
        "            PASS if limits else INCONCLUSIVE,\n",
        "            PASS,\n",
        ("tests/unit/test_gates.py::test_without_a_baseline_and_without_a_limit_nothing_decides",),
    ),
    Guard(
        "I8",
        "a receipt that names too few nodes proves nothing",
        "tasks/steps/audit.py",
        '    check_nodes(body["release"]["id"], body["nodes"], _nodes_of(body["release"]))\n',
        "",
        ("tests/unit/test_step_audit.py::test_a_receipt_that_proves_too_little_is_refused",),
    ),
    Guard(
        "I1",
        "a blob is named in the store only after its digest matched",
        "tasks/node/transfer.py",
        "            self._check(size_bytes, digest.hexdigest())\n",
        "",
        ("tests/unit/test_pull.py::test_wrong_bytes_twice_fail_and_nothing_is_named",),
    ),
    Guard(
        "I1",
        "a blob is stated only after the store has shown that it holds it",
        "tasks/node/transfer.py",
        "        self._check_kept(sent)\n",
        "",
        (
            "tests/unit/test_pull.py::test_a_store_that_keeps_nothing_gets_no_statement",
            "tests/unit/test_pull.py::test_a_store_that_keeps_other_bytes_is_found_out",
        ),
    ),
    Guard(
        "I1",
        "a blob without its statement is read before it is trusted",
        "tasks/node/transfer.py",
        "        if self._read_back() == self.file.sha256:\n",
        "        if True:\n",
        ("tests/unit/test_pull.py::test_a_blob_without_a_statement_is_verified_anew",),
    ),
    Guard(
        "I1",
        "a part of the file from elsewhere is not put in its place",
        "tasks/adapters/hub_answers.py",
        "span is None or int(span.group(1)) != offset:",
        "span is None:",
        (
            "tests/contract/hub/test_wire_lying_hub.py::test_a_lie_that_is_told_once_costs_a_try_and_no_byte_of_it_is_kept",
        ),
    ),
    Guard(
        "I5",
        "no child of a pull outlives it",
        "tasks/node/watched_child.py",
        "        _die_with(parent)\n",
        "",
        ("tests/unit/test_watched_child.py::test_it_dies_with_its_parent_however_that_dies",),
    ),
    Guard(
        "I5",
        "a file that stands has its process replaced",
        "tasks/node/byte_watch.py",
        "moved < within_s * self._patience.min_bytes_per_s:",
        "False:",
        (
            "tests/unit/test_byte_watch.py::test_a_file_that_stands_is_seen_after_the_window",
            "tests/unit/test_byte_watch.py::test_a_drip_is_a_stand",
        ),
    ),
    Guard(
        "I6",
        "the Hub's token goes to the Hub alone",
        "tasks/adapters/hub.py",
        'self._token() if origin(at) == origin(self._endpoint) else ""',
        "self._token()",
        ("tests/contract/hub/test_wire_lying_hub.py::test_the_token_does_not_go_to_the_host_that_has_the_bytes",),
    ),
    Guard(
        "I10",
        "an upload that a living puller writes is not ended",
        "tasks/node/orphans.py",
        " or upload.idle_s < how.idle_s:",
        ":",
        ("tests/unit/test_orphans.py::test_a_living_puller_writes_and_is_let_alone",),
    ),
    Guard(
        "I2",
        "the marker is gone before a rotten file is touched",
        "tasks/node/repair.py",
        "                self._unmark()\n",
        "",
        ("tests/unit/test_scrub.py::test_the_marker_is_gone_before_the_file_is_touched",),
    ),
    Guard(
        "I2",
        "a node with rot that stays has no label any more",
        "tasks/steps/scrubbing.py",
        "        _label(ports, target.lock, node, obj, None)\n",
        "",
        ("tests/unit/test_step_scrubbing.py::test_rot_that_stays_takes_the_label_and_every_node_is_read_all_the_same",),
    ),
    Guard(
        "I10",
        "what a release claims stays on the nodes",
        "tasks/core/collection.py",
        "        claims = self.claims.get(path, ())\n",
        "        claims = self.claims.get(path, ())[:0]\n",
        (
            "tests/unit/test_step_collecting.py::test_live_and_rollback_target_stay",
            "tests/unit/test_step_collecting.py::test_what_is_not_promoted_yet_stays_until_it_is_given_up",
        ),
    ),
    Guard(
        "I10",
        "what a pod mounts stays on its node",
        "tasks/core/collection.py",
        '            if use.node in ("", node) and use.covers(path):\n',
        '            if use.node == "no such node" and use.covers(path):\n',
        (
            "tests/unit/test_step_collecting.py::test_a_set_that_is_in_the_cluster_keeps_its_weights_whatever_the_ledger_says",
            "tests/unit/test_step_collecting.py::test_somebody_elses_pod_that_mounts_the_directory_keeps_all_of_that_node",
        ),
    ),
    Guard(
        "I10",
        "what any process of the node has open stays, in whatever container",
        "tasks/node/collect.py",
        "                    if problem is not None:\n",
        "                    if problem is not None and not files:\n",
        ("tests/unit/test_collect.py::test_what_an_engine_has_open_or_mapped_stays",),
    ),
    Guard(
        "I10",
        "what was used since the list stays, also if nothing was changed",
        "tasks/node/collect.py",
        "                if self._token(path) != token:\n",
        "                if not token:\n",
        (
            "tests/unit/test_collect.py::test_what_a_stager_has_looked_at_since_stays_although_it_changed_nothing",
            "tests/unit/test_step_collecting.py::test_a_release_that_begins_after_the_decision_keeps_what_it_needs",
        ),
    ),
    Guard(
        "I10",
        "where a stager or a scrub works nothing is moved",
        "tasks/node/collect.py",
        "                if not free:\n",
        "                if free is None:\n",
        ("tests/unit/test_collect.py::test_where_somebody_works_nothing_is_moved",),
    ),
    Guard(
        "I10",
        "the trash has an age by both clocks",
        "tasks/node/collect.py",
        "        if age_s < order.trash_age_s:\n",
        "        if age_s < 0 > order.trash_age_s:\n",
        ("tests/unit/test_collect.py::test_a_clock_that_jumps_makes_nothing_older",),
    ),
    Guard(
        "I10",
        "a checkpoint's label is off before it goes",
        "tasks/steps/collecting.py",
        "    _take_labels(ports, survey)\n",
        "",
        (
            "tests/unit/test_step_collecting.py::test_what_was_replaced_and_retired_goes_to_the_trash_and_later_for_good",
        ),
    ),
    Guard(
        "I10",
        "who needs a file of the store is read again after its .ok was taken",
        "tasks/steps/store_collecting.py",
        "        needed = read_needed(ports).sha256\n",
        "        needed = frozenset[str]()\n",
        (
            "tests/unit/test_step_collecting.py::test_a_release_that_begins_while_the_store_is_collected_keeps_its_files",
        ),
    ),
    Guard(
        "I10",
        "a file of the store goes only from behind a tombstone of an earlier run",
        "tasks/core/store_collection.py",
        "        elif blob.sha256 not in tombstones:\n",
        "        elif blob.sha256 not in tombstones and age_s:\n",
        ("tests/unit/test_collection.py::test_a_file_of_the_store_is_buried_first_also_where_the_trash_has_no_age",),
    ),
)


def pytest(copy: Path, tests: tuple[str, ...], within_s: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    """Run tests in the copy, importing the copy and nothing of the tree it was made from."""
    argv = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", *tests]
    try:
        return subprocess.run(
            argv,
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=within_s,
        )
    except subprocess.TimeoutExpired:
        # A hang is no red test: the exit status is one that pytest does not have.
        return subprocess.CompletedProcess(argv, 124, f"no end within {within_s:.0f} s", "")


def check_imports(copy: Path) -> None:
    """Stop unless it is the copy that is imported there: an editable install must not win."""
    probe = copy / "tests" / "test_imports_the_copy.py"
    probe.write_text(
        "import flows, manifests, tasks\n"
        "def test_it():\n"
        f"    assert all(m.__path__[0].startswith({str(copy)!r}) for m in (flows, manifests, tasks))\n"
    )
    done = pytest(copy, (str(probe),))
    probe.unlink()
    if done.returncode != 0:
        sys.exit(f"the copy is not what is imported:\n{done.stdout[-2000:]}")


def take_out(copy: Path, guard: Guard) -> str:
    """Run a guard's tests without it and return what went wrong; empty when each turned red."""
    path = copy / guard.file
    text = path.read_text()
    if text.count(guard.there) != 1:
        return f"stands {text.count(guard.there)} times in {guard.file}: the patch no longer applies"
    path.write_text(text.replace(guard.there, guard.without))
    try:
        done = pytest(copy, guard.tests)
    finally:
        path.write_text(text)
    failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    for test in guard.tests:
        red = [one for one in failed if one == test or one.startswith(f"{test}[")]
        if done.returncode != 1 or not red:
            return f"{test} stayed green, or could not be run\n{done.stdout[-1500:]}"
    return ""


def make_copy(copy: Path) -> Path:
    """Copy what is imported and tested, and check that it is the copy that is imported there."""
    copy.mkdir()
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy / name)
    check_imports(copy)
    return copy


def examine(copy: Path, guards: Sequence[Guard]) -> list[str]:
    """Take out guards one after another in one copy, say how each went, and return the problems."""
    problems = []
    for guard in guards:
        problem = take_out(copy, guard)
        if problem:
            problems.append(f"{guard.invariant} {guard.what}")
            print(f"{guard.invariant} NOT GUARDED ({guard.what}): {problem}", flush=True)
        for test in () if problem else guard.tests:
            print(f"{guard.invariant} guard removed ({guard.what}): {test} turned red", flush=True)
    return problems


def main() -> int:
    """Take out every guard in turn; return 1 if a test stays green or a patch does not apply."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="k2-guards-") as directory, ThreadPoolExecutor(JOBS) as pool:
        copies = list(pool.map(make_copy, [Path(directory) / str(number) for number in range(JOBS)]))
        tests = tuple(dict.fromkeys(test for guard in GUARDS for test in guard.tests))
        whole = pytest(copies[0], tests, WHOLE_TIMEOUT_S)
        if whole.returncode != 0:
            print(whole.stdout[-3000:])
            print("a guarding test is red with its guard in place")
            return 1
        found = pool.map(examine, copies, [GUARDS[number::JOBS] for number in range(JOBS)])
        problems = [problem for several in found for problem in several]
    kinds = len({guard.invariant for guard in GUARDS})
    print(f"{len(GUARDS)} guards of {kinds} invariants, {len(problems)} problems, {time.monotonic() - began:.1f} s")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
