"""Sends the worker's spans to a collector, by OTLP over HTTP."""

from __future__ import annotations

from tenure.core.errors import UsageError


def set_up_traces(otlp_url: str, worker_id: str) -> None:
    """Make the process's tracer provider; it sends what is left when the process ends."""
    if not otlp_url.lower().startswith(("http://", "https://")):
        raise UsageError("worker.otlp_url is an http or https URL, such as http://127.0.0.1:4318")
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise UsageError(f"{error}; worker.otlp_url needs: pip install 'tenure[otel]'") from None
    names = {"service.name": "tenure-worker", "service.instance.id": worker_id}
    provider = TracerProvider(resource=Resource.create(names))
    exporter = OTLPSpanExporter(endpoint=f"{otlp_url.rstrip('/')}/v1/traces")
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
