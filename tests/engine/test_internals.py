"""What the adapter uses of vLLM that is not public. Each test names the place that must change when vLLM moves."""

import inspect
import re
from pathlib import Path

from vllm.config import CompilationConfig
from vllm.device_allocator.cumem import CuMemAllocator
from vllm.device_allocator.sleep_mode_backend import CuMemBackend
from vllm.distributed.weight_transfer import VLLMWeightSyncClient, WeightTransferEngine, WeightTransferTrainerFactory
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.utils import mem_utils
from vllm.v1.engine import core
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import AsyncMPClient, BackgroundResources, DPLBAsyncMPClient
from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer, check_stop_strings
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestState
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.engine.utils import CoreEngineProcManager
from vllm.v1.executor.abstract import SLEEP_TAGS, Executor
from vllm.v1.metrics.stats import IterationStats
from vllm.v1.outputs import LogprobsLists
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from genserve.engine.generation import ConstraintKind, Sampling
from genserve.engine.types import MEMORY_TAGS
from genserve.engine.vllm.requests.stream import StreamedSequence
from genserve.engine.vllm.requests.weight_spans import INITIAL_LABEL
from genserve.engine.vllm.start import config as vllm_config
from genserve.integrations.vllm_sync import GenserveWeightSyncClient
from genserve.worker.contract.calls import WeightWorker
from genserve.worker.extension import WeightExchangeExtension
from genserve.worker.update.reserving import ReservingWorker
from tests.support.signatures import parameters


def test_a_pause_of_the_scheduler_still_takes_requests_that_come_meanwhile() -> None:
    """engine.vllm.scheduling pauses by pause_scheduler, as vLLM's sleep does. AsyncLLM.pause_generation is the same
    call and a fixed sleep in 0.32. From 0.33 on its "abort" and "wait" also refuse new requests until the engine is
    resumed, and genserve keeps those in vLLM's queue."""
    assert {"mode", "clear_cache"} <= parameters(AsyncMPClient.pause_scheduler_async)
    assert 'call_utility_async("pause_scheduler", mode, clear_cache)' in inspect.getsource(
        AsyncMPClient.pause_scheduler_async
    )
    assert "self.pause_scheduler(mode=mode, clear_cache=clear_prefix_cache)" in inspect.getsource(core.EngineCore.sleep)
    assert "Requests are still accepted" in str(core.EngineCore.sleep.__doc__)
    for each in (core.EngineCore, core.EngineCoreProc, core.DPEngineCoreProc):
        assert "reject" not in inspect.getsource(each.pause_scheduler), each
    public = inspect.getsource(AsyncLLM.pause_generation)
    assert "await self.renderer.clear_mm_cache_async()" in public
    if hasattr(core.EngineCoreProc, "pause_generation"):  # 0.33
        assert "self.engine_core.pause_generation_async(" in public
        refusing = inspect.getsource(core.EngineCoreProc.pause_generation)
        assert "future = self.pause_scheduler(mode, clear_cache)" in refusing
        assert 'self.reject_new_requests = mode != "keep"' in refusing
        # Nothing else turns it on.
        written = re.findall(r"self\.reject_new_requests = (.+)", inspect.getsource(core))
        assert sorted(written) == ["False", "False", 'mode != "keep"']
    else:
        assert "self.engine_core.pause_scheduler_async(mode=mode, clear_cache=clear_cache)" in public
        assert "reject_new_requests" not in inspect.getsource(core)


def test_the_caches_that_a_pause_drops_are_still_these() -> None:
    """engine.vllm.scheduling.reset_caches drops them in an engine that is paused already, by three calls."""
    source = inspect.getsource(core.EngineCore._reset_caches)
    assert "reset_running_requests: bool = True" in source
    assert "reset_connector: bool = True" in source
    calls = [line.strip() for line in source.splitlines() if line.strip().startswith(("self.", "if not self."))]
    assert calls == ["if not self.reset_prefix_cache(", "self.reset_mm_cache()", "self.reset_encoder_cache()"]
    assert parameters(core.EngineCore.reset_prefix_cache) == {"self", "reset_running_requests", "reset_connector"}
    # The processed images that the renderer knows are those that EngineCore knows.
    source = inspect.getsource(AsyncLLM.reset_mm_cache)
    assert "await self.renderer.clear_mm_cache_async()" in source
    assert "await self.engine_core.reset_mm_cache_async()" in source


def test_a_sleep_that_waits_still_sleeps_whenever_requests_have_ended() -> None:
    """engine.vllm.scheduling.sleep pauses first: vLLM's callback stays registered when the call is given up."""
    source = inspect.getsource(core.EngineCore.sleep)
    assert "pause_future.add_done_callback(pause_complete)" in source
    assert "_idle_state_callbacks.append" in inspect.getsource(core.EngineCoreProc.pause_scheduler)


def test_an_engine_still_runs_as_soon_as_all_of_its_memory_is_awake() -> None:
    """control.sleep wakes the last part alone, when the weights are of a version, and control.asleep counts parts as
    vLLM does. A tag that is awake makes vLLM ignore the whole call, so engine.vllm.scheduling leaves the last part to
    it."""
    assert "if fully_awake:\n            self.resume_scheduler()" in inspect.getsource(core.EngineCore.wake_up)
    assert {tag.value for tag in MEMORY_TAGS} == SLEEP_TAGS
    assert "is already sleeping" in inspect.getsource(Executor.sleep)
    assert "if tag not in self.sleeping_tags:" in inspect.getsource(Executor.wake_up)


def test_the_kv_cache_alone_is_still_given_back_by_this_name() -> None:
    """engine.vllm.scheduling calls it for a sleep of that tag, and does without on the CPU."""
    assert '.discard(("kv_cache",))' in inspect.getsource(core.EngineCore.release_kv_cache_memory)
    assert "raise RuntimeError" in inspect.getsource(CPUWorker.discard)


def test_level_2_sleep_still_keeps_buffers_and_the_rest_of_the_pool() -> None:
    """worker.model.slept keeps that rest, found by its tag; vLLM copies buffers and, by name, parameters of drafts."""
    source = inspect.getsource(Worker.sleep)
    assert "self._sleep_saved_buffers" in source
    assert "self._save_sleep_parameters(model)" in source
    assert 'pattern != "draft.*"' in inspect.getsource(Worker._save_sleep_parameters)
    assert 'offload_tags = ("weights", *offload_tags)' in inspect.getsource(CuMemBackend.suspend)
    assert 'self._maybe_get_memory_pool_context(tag="weights")' in inspect.getsource(Worker.load_model)
    assert "self.pointer_to_data: dict[int, AllocationData]" in inspect.getsource(CuMemAllocator.__init__)


def test_engines_in_lockstep_still_refuse_to_resume_during_a_pause() -> None:
    """engine.vllm.scheduling.resume waits for such a pause; others resume at once."""
    assert "raise RuntimeError" in inspect.getsource(core.DPEngineCoreProc.resume_scheduler)
    if "resume_scheduler" in vars(core.EngineCoreProc):  # 0.33, where it also takes new requests again
        assert "raise" not in inspect.getsource(core.EngineCoreProc.resume_scheduler)
    assert "raise" not in inspect.getsource(core.EngineCore.resume_scheduler)
    assert "if data_parallel and vllm_config.model_config.is_moe" in inspect.getsource(core.EngineCoreProc)


def test_the_processes_of_the_engine_are_still_found_there() -> None:
    """engine.vllm.activity looks at what they do."""
    assert "self.processes" in inspect.getsource(CoreEngineProcManager.__init__)
    assert "engine_manager" in inspect.getsource(BackgroundResources)


def test_a_collective_call_still_reaches_every_engine_by_this_name() -> None:
    """engine.vllm.workers calls call_utility_all_async, as collective_rpc keeps the first engine's answers only."""
    assert "return (await self.call_utility_all_async(method, *args))[0]" in inspect.getsource(
        DPLBAsyncMPClient.call_utility_async
    )
    assert {"method", "args"} <= parameters(AsyncMPClient.call_utility_all_async)
    assert {"method", "timeout", "args", "kwargs"} <= parameters(core.EngineCore.collective_rpc)


def test_live_starts_of_weight_spans_are_still_in_the_request_state() -> None:
    """engine.vllm.requests.stream reads them there."""
    assert "self.weight_version_starts: list[tuple[str, int]]" in inspect.getsource(RequestState.__init__)
    tracking = inspect.getsource(RequestState.track_weight_version)
    assert "starts.append((weight_version, self.detokenizer.num_output_tokens()))" in tracking


def test_what_an_interruption_reads_is_still_in_the_request_state() -> None:
    """engine.vllm.clients.interruption counts with these, and vLLM's times of outputs are those of the engine."""
    made = inspect.getsource(RequestState.__init__)
    assert "self.prompt_len = " in made and "self.is_prefilling = True" in made
    source = inspect.getsource(IterationStats.update_from_output)
    assert "itl = engine_core_timestamp - req_stats.last_token_ts\n" in source
    assert "self.inter_token_latencies_iter.append(itl)" in source


def test_states_can_still_be_replaced_when_they_are_made() -> None:
    """engine.vllm.requests.outputs does so in add_request, which makes all states of a request before anything is sent
    to the engine. The processor of outputs is still set in the client's constructor, before the task that uses it."""
    adding = inspect.getsource(OutputProcessor.add_request)
    assert "self.request_states[request_id] = req_state" in adding and adding.rstrip().endswith(
        "_update_admission_stats()"
    )
    source = inspect.getsource(AsyncLLM.add_request)
    made, sent = source.rindex("self.output_processor.add_request("), source.rindex("engine_core.add_request_async(")
    assert made < source.index("for child_request in child_requests:") < sent
    one = inspect.getsource(AsyncLLM._add_request)
    assert one.index("self.output_processor.add_request(") < one.index("await self.engine_core.add_request_async(")
    assert "queue = RequestOutputCollector(params.output_kind, request.request_id)" in source
    assert not hasattr(RequestState, "__slots__"), "what an object with slots has is not in its __dict__"
    making = inspect.getsource(AsyncLLM.__init__)
    assert making.index("self.output_processor = OutputProcessor(") < making.index("self._run_output_handler()")
    known = {"self", "tokenizer", "log_stats", "stream_interval", "tracing_enabled", "admission_stats"}
    assert parameters(OutputProcessor.__init__) == known


def test_what_our_states_replace_is_still_used_by_these_names_alone() -> None:
    """engine.vllm.requests.stream and logprobs implement what vLLM's processing calls, and no more."""
    processing = inspect.getsource(OutputProcessor)
    assert set(re.findall(r"detokenizer\.(\w+)", processing)) == {"num_output_tokens", "update"}
    assert set(re.findall(r"logprobs_processor\.(\w+)", processing)) == {"update_from_output"}
    assert set(re.findall(r"state\.queue\.(\w+)", processing)) == {"put"}
    assert processing.count("if request_output := req_state.make_request_output(") == 1
    assert list(inspect.signature(RequestState.make_request_output).parameters) == list(
        inspect.signature(StreamedSequence.make_request_output).parameters
    )
    assert set(re.findall(r"output\.(new_\w+)", inspect.getsource(LogprobsProcessor))) == {
        "new_logprobs",
        "new_prompt_logprobs_tensors",
    }
    assert LogprobsLists._fields[:3] == ("logprob_token_ids", "logprobs", "sampled_token_ranks")
    assert "self.child_requests.remove(child_request_id)" in inspect.getsource(ParentRequest.get_outputs)


def test_text_that_was_read_can_still_be_dropped() -> None:
    """engine.vllm.requests.stream shortens what the detokenizer has, which counts from the end or from these two."""
    reading = inspect.getsource(BaseIncrementalDetokenizer.get_next_output_text)
    assert "last_offset = self._last_output_text_offset" in reading
    assert "return self.output_text[last_offset:length]" in reading
    assert "output_text.find(stop_str, 1 - new_char_count - stop_string_len)" in inspect.getsource(check_stop_strings)
    assert "self.stop = " in inspect.getsource(BaseIncrementalDetokenizer.__init__)


def test_a_request_that_the_input_processor_made_is_still_taken() -> None:
    """engine.vllm.requests.build makes it in a thread and checks it; vLLM says that it will not take it for ever."""
    source = inspect.getsource(AsyncLLM.add_request)
    assert "if isinstance(prompt, EngineCoreRequest):" in source
    assert "self.input_processor.assign_request_id(request)" in source
    assert {"supported_tasks", "lora_request", "priority", "data_parallel_rank"} <= parameters(
        InputProcessor.process_inputs
    )
    decoding = inspect.getsource(core.EngineCoreProc.process_input_sockets)
    assert "add_request_decoder = MsgpackDecoder(\n            EngineCoreRequest" in decoding


def test_generation_config_stop_token_is_still_added_to_requests() -> None:
    """engine.vllm.requests.stream tells those that the request did not name as EOS."""
    source = inspect.getsource(SamplingParams.update_from_generation_config)
    assert "eos_ids.update(self.stop_token_ids)" in source


def test_the_label_of_the_first_weights_is_still_the_one_we_call_version_0() -> None:
    """engine.vllm.requests.weight_spans maps it."""
    assert f'self._weight_version = "{INITIAL_LABEL}"' in inspect.getsource(core.EngineCore.__init__)


def test_the_output_handler_is_still_a_task_that_ends_when_the_engine_dies() -> None:
    """engine.vllm takes its end as the engine's death."""
    source = inspect.getsource(AsyncLLM._run_output_handler)
    assert "self.output_handler = asyncio.create_task(output_handler())" in source
    assert "output_processor.propagate_error(e)" in source


def test_every_constraint_and_sampling_field_has_vllms_name() -> None:
    """engine.vllm.requests.build passes them on by name."""
    assert {kind.value for kind in ConstraintKind} <= parameters(StructuredOutputsParams)
    assert set(Sampling.__dataclass_fields__) <= parameters(SamplingParams)
    assert "lora_name" in parameters(LoRARequest)


def test_layers_still_register_in_the_context_that_the_shadow_replaces() -> None:
    """worker.update.structure gives the second model registries of its own."""
    assert {"static_forward_context", "static_all_moe_layers"} <= set(CompilationConfig.__dataclass_fields__)


def test_gpu_worker_still_loads_the_model_before_counting_free_memory() -> None:
    """`ReservingWorker` takes memory in between, and reads how much vLLM may take."""
    assert parameters(Worker.load_model) == parameters(ReservingWorker.load_model)
    sizing = inspect.getsource(Worker.determine_available_memory)
    assert "self.requested_memory" in sizing
    assert "init_free_memory = self.init_snapshot.free_memory" in sizing
    counted = " ".join(inspect.getsource(mem_utils.memory_profiling).split())
    assert "total_consumed = ( result.before_create.free_memory - result.after_profile.free_memory )" in counted
    assert "self.requested_memory = request_memory(" in inspect.getsource(Worker.init_device)
    starting = inspect.getsource(core.EngineCore.__init__)
    assert starting.index("executor_class(vllm_config)") < starting.index("self._initialize_kv_caches(")


def test_the_rank_still_has_a_name() -> None:
    """worker.extension labels acknowledgements and digests with it."""
    assert "dp{dp}:pp{pp}:pcp{pcp}:tp{tp}:" in inspect.getsource(Worker._weight_checksum_prefix)


def test_extension_offers_every_contract_call_and_hides_none_of_vllms() -> None:
    """vLLM refuses an extension whose names it has itself, at the start of every worker."""
    calls = {name for name in vars(WeightWorker) if name.startswith("genserve_")}
    ours = {name for name in dir(WeightExchangeExtension) if not name.startswith("__")}
    assert calls == ours
    assert not ours & set(dir(Worker))
    for name in calls:
        assert parameters(getattr(WeightExchangeExtension, name)) == parameters(getattr(WeightWorker, name))


def test_an_update_that_is_open_is_still_known_by_these_names() -> None:
    """worker.extension ends one that was not finished: vLLM has no call for it."""
    assert "self._weight_update_active = False" in inspect.getsource(Worker.finish_weight_update)
    assert "finally" not in inspect.getsource(Worker.finish_weight_update), "it may clean up after a failure now"
    assert {"kernel_tensors", "load_numel_total"} <= set(LayerReloadingInfo.__dataclass_fields__)
    assert parameters(layerwise._place_kernel_tensors) == {"layer", "info"}
    assert parameters(layerwise.get_layerwise_info) == {"layer"}
    assert "LOADING_LAYERS.clear()" in inspect.getsource(layerwise.finalize_layerwise_processing)
    assert "_original_do_torchao_reload" in inspect.getsource(layerwise.initialize_layerwise_reload)
    assert {"drain_pending", "reset_weight_update_target"} <= set(dir(WeightTransferEngine))


def test_vllms_transfer_still_needs_an_accelerator() -> None:
    """docs/vllm_transfer.md says that none of its backends runs on a CPU; tests/engine/file_transfer.py avoids it."""
    assert "torch.accelerator.synchronize()" in inspect.getsource(WeightTransferEngine.update_weights)


def test_the_trainers_half_of_vllm_is_still_what_ours_looks_like() -> None:
    """Its classes are structural: vLLM asks for these names alone."""
    with GenserveWeightSyncClient("127.0.0.1:1") as client:
        assert isinstance(client, VLLMWeightSyncClient)
    for name in ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"):
        ours, vllms = getattr(GenserveWeightSyncClient, name), getattr(VLLMWeightSyncClient, name)
        assert parameters(ours) == parameters(vllms)
    source = inspect.getsource(WeightTransferTrainerFactory.trainer_init)
    assert "backend = init_info.backend" in source
    assert "engine_cls.trainer_init(" in source
    assert parameters(WeightTransferTrainerFactory.trainer_init) == {"init_info", "client", "source"}


def test_unlimited_logprobs_are_reported_as_the_size_of_the_vocabulary(checkpoints: dict[str, Path]) -> None:
    """vLLM says -1, which TRL's documentation recommends; the wire has no negative numbers there."""
    config = vllm_config.AsyncEngineArgs(model=str(checkpoints["a"]), max_logprobs=-1).create_engine_config()
    info = vllm_config.info(config, 1)
    assert info.max_logprobs == info.vocab_size > 0
