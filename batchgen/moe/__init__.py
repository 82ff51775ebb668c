"""Mixture-of-experts layers: `router` chooses experts, `dispatch` sorts tokens by expert, `experts` multiplies."""
