"""Why a job does not start or stops early. In: nothing. Out: exception classes, each with the exit code of `rollout run`.

BatchGenError
├── JobRefused(ValueError)  exit 2: nothing was done, the message says what to change
└── JobStopped              what is done is kept and the same command goes on
    ├── TooManyFailures     exit 3: --max-error-rate was passed
    ├── BackendLost         exit 4: the service or engine is gone
    └── JobWriteError       exit 5: a result could not be written
"""

from batchgen.errors import BatchGenError


class JobRefused(BatchGenError, ValueError):
    code = "job_refused"
    exit_code = 2


class JobStopped(BatchGenError):
    code = "job_stopped"
    exit_code = 1


class TooManyFailures(JobStopped):
    code = "too_many_failures"
    exit_code = 3


class BackendLost(JobStopped):
    code = "backend_lost"
    retryable = True
    exit_code = 4


class JobWriteError(JobStopped):
    code = "write_failed"
    retryable = True
    exit_code = 5


class JobInterrupted(JobStopped):
    code = "interrupted"
    retryable = True
    exit_code = 130
