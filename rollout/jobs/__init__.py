"""Batch jobs: a file of requests in, a file of results out, resumable. Never imports torch by itself."""

from rollout.jobs.backend import Backend, EmbeddedBackend
from rollout.jobs.config import JobConfig
from rollout.jobs.errors import BackendLost, JobInterrupted, JobRefused, JobStopped, JobWriteError, TooManyFailures
from rollout.jobs.progress import PlainReporter, Reporter, Summary, default_reporter
from rollout.jobs.results import ResultRow
from rollout.jobs.runner import Job
from rollout.jobs.service_backend import ServiceBackend

__all__ = [
    "Backend",
    "BackendLost",
    "EmbeddedBackend",
    "Job",
    "JobConfig",
    "JobInterrupted",
    "JobRefused",
    "JobStopped",
    "JobWriteError",
    "PlainReporter",
    "Reporter",
    "ResultRow",
    "ServiceBackend",
    "Summary",
    "TooManyFailures",
    "default_reporter",
]
