"""Assembly of a runtime, and generation with it."""

from offload_runtime.engine.asynchronous import AsyncTokenStream
from offload_runtime.engine.conversation import Conversation, TokenStream
from offload_runtime.engine.engine import TokenEvent
from offload_runtime.engine.events import EndEvent, ErrorEvent, Ticket
from offload_runtime.engine.request import GenerationResult, GenerationStats
from offload_runtime.engine.runtime import Runtime
from offload_runtime.engine.scheduler import Scheduler, SchedulerCounters
from offload_runtime.sampling import TokenLogprobs
from offload_runtime.weights.sources import fetch_demo_model
