"""The part of the published schemas that our files for clusters use; and whole CustomResourceDefinitions, made strict.

Written after kubeflow/trainer (manifests/base/crds, v2.3) and kubernetes-sigs/jobset (config/components/crd/bases,
v1alpha2). Every object is closed: a field that is not listed here is a mistake of ours.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
TEXT: Schema = {"type": "string", "minLength": 1}
COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
LABEL: Schema = {"type": "string", "pattern": "^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$"}
TEXTS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}


def closed(required: str = "", **properties: Schema) -> Schema:
    """An object with these fields and no others."""
    return {
        "type": "object",
        "required": required.split(),
        "properties": properties,
        "additionalProperties": False,
    }


def some(items: Schema) -> Schema:
    return {"type": "array", "minItems": 1, "items": items}


VARIABLE = closed(
    "name",
    name={"type": "string", "pattern": "^[A-Z][A-Z0-9_]*$"},
    value={"type": "string"},
    valueFrom=closed(fieldRef=closed("fieldPath", fieldPath=TEXT), secretKeyRef=closed("key", name=LABEL, key=TEXT)),
)
QUANTITIES: Schema = {"type": "object", "additionalProperties": {"type": ["integer", "string"]}}
RESOURCES = closed(limits=QUANTITIES, requests=QUANTITIES)
CONTAINER = closed(
    "name",
    name=LABEL,
    image=TEXT,
    command=some({"type": "string"}),
    workingDir=TEXT,
    env=some(VARIABLE),
    ports=some(closed("containerPort", containerPort={**COUNT, "maximum": 65535})),
    resources=RESOURCES,
    volumeMounts=some(closed("mountPath name", mountPath=TEXT, name=LABEL)),
)
VOLUME = closed(
    "name",
    name=LABEL,
    emptyDir=closed(medium={"enum": ["", "Memory"]}),
    persistentVolumeClaim=closed("claimName", claimName=TEXT),
)
POD = closed(
    "containers",
    restartPolicy={"const": "Never"},
    terminationGracePeriodSeconds=COUNT,
    containers=some(CONTAINER),
    volumes=some(VOLUME),
)
EXIT_CODES = closed(
    "operator values",
    containerName=TEXT,
    operator={"enum": ["In", "NotIn"]},
    values=some({**COUNT, "minimum": 1, "maximum": 255}),
)
FAILURE_RULE = closed(
    "action",
    action={"enum": ["FailJob", "FailIndex", "Ignore", "Count"]},
    onExitCodes=EXIT_CODES,
    onPodConditions=some(closed("type", type=TEXT, status={"enum": ["True", "False", "Unknown"]})),
)
JOB = closed(
    "template",
    completionMode={"enum": ["Indexed", "NonIndexed"]},
    backoffLimit=COUNT,
    parallelism=COUNT,
    completions=COUNT,
    podFailurePolicy=closed("rules", rules=some(FAILURE_RULE)),
    template=closed(spec=POD),
)
RESTART_RULE = closed(
    "action name",
    name=TEXT,
    action={"enum": ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]},
    onJobFailureReasons=some({"enum": ["BackoffLimitExceeded", "DeadlineExceeded", "PodFailurePolicy"]}),
)
JOBSET_SPEC = closed(
    "replicatedJobs",
    failurePolicy=closed(maxRestarts=COUNT, rules=some(RESTART_RULE)),
    replicatedJobs=some(
        closed("name template", name=LABEL, replicas=COUNT, template=closed(metadata=closed(labels=TEXTS), spec=JOB))
    ),
)
METADATA = closed("name", name=LABEL, labels=TEXTS)


def kind(api: str, name: str, spec: Schema) -> Schema:
    return closed(
        "apiVersion kind metadata spec",
        apiVersion={"const": api},
        kind={"const": name},
        metadata=METADATA,
        spec=spec,
    )


TRAINER = closed(
    image=TEXT,
    command=some({"type": "string"}),
    numNodes=COUNT,
    numProcPerNode={**COUNT, "minimum": 1},
    resourcesPerNode=RESOURCES,
    env=some(VARIABLE),
)
SCHEMAS = {
    "Secret": closed(
        "apiVersion kind metadata",
        apiVersion={"const": "v1"},
        kind={"const": "Secret"},
        metadata=METADATA,
        stringData=TEXTS,
    ),
    "JobSet": kind("jobset.x-k8s.io/v1alpha2", "JobSet", JOBSET_SPEC),
    "TrainingRuntime": kind(
        "trainer.kubeflow.org/v1alpha1",
        "TrainingRuntime",
        closed(
            "template",
            mlPolicy=closed(numNodes=COUNT, torch=closed()),
            template=closed(spec=JOBSET_SPEC),
        ),
    ),
    "TrainJob": kind(
        "trainer.kubeflow.org/v1alpha1",
        "TrainJob",
        closed(
            "runtimeRef",
            runtimeRef=closed(
                "name",
                apiGroup=TEXT,
                kind={"enum": ["TrainingRuntime", "ClusterTrainingRuntime"]},
                name=LABEL,
            ),
            trainer=TRAINER,
        ),
    ),
}


def strict(schema: Any) -> Any:
    """A schema of a CustomResourceDefinition in which an unknown field, which Kubernetes would drop, is an error."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: strict(one) for name, one in schema.items() if not name.startswith("x-")}
    if schema.get("x-kubernetes-int-or-string"):
        made["type"] = ["integer", "string"]
    if "properties" in schema and schema.get("type") == "object":
        made.setdefault("additionalProperties", bool(schema.get("x-kubernetes-preserve-unknown-fields")))
    return made


def definition(document: dict[str, Any]) -> tuple[str, Schema]:
    """The kind that a CustomResourceDefinition is of, and its schema."""
    (version,) = [one for one in document["spec"]["versions"] if one["storage"]]
    schema = strict(version["schema"]["openAPIV3Schema"])
    # Kubernetes knows it by itself.
    schema["properties"]["metadata"] = METADATA
    return document["spec"]["names"]["kind"], schema
