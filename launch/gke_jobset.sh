#!/usr/bin/env bash
# A TPU slice of Google Kubernetes Engine, as a JobSet: launch/gke_jobset.sh [--dry-run]; a dry run
# prints the manifest. Edit three lines; docs/launch.md has the rest. Needs kubectl, JobSet in the
# cluster, the image of launch/Containerfile, and a volume for runs and data, for all pods.
set -euo pipefail
cd "$(dirname "$0")/.."
name=fedjax-flat image=YOUR_IMAGE claim=fedjax-flat
accelerator=tpu-v5-lite-podslice topology=4x4 hosts=4 chips=4
train=(--config configs/fedsam.py:cifar100 --run /mnt/share/runs/gke --data /mnt/share/data)

source launch/common.bash

manifest() {
  local arguments
  arguments=$(printf ', "%s"' train "${train[@]}" --timeout 300 --quiet)
  cat << END
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: $name
  annotations: {alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool}
spec:
  failurePolicy: {maxRestarts: 100}  # a pod that is pre-empted ends all; then they go on
  replicatedJobs:
  - name: host
    replicas: 1
    template:
      spec:
        parallelism: $hosts
        completions: $hosts
        completionMode: Indexed
        backoffLimit: 0
        template:
          spec:
            restartPolicy: Never
            terminationGracePeriodSeconds: 120  # to finish the round and save
            nodeSelector:
              cloud.google.com/gke-tpu-accelerator: $accelerator
              cloud.google.com/gke-tpu-topology: $topology
            containers:
            - name: train
              image: $image
              args: [${arguments#, }]
              env:
              - {name: JAX_COORDINATOR_ADDRESS, value: "$name-host-0-0.$name:8476"}
              - {name: JAX_NUM_PROCESSES, value: "$hosts"}
              - name: JAX_PROCESS_ID
                valueFrom:
                  fieldRef:
                    fieldPath: metadata.annotations['batch.kubernetes.io/job-completion-index']
              ports: [{containerPort: 8476}]
              resources: {requests: {google.com/tpu: $chips}, limits: {google.com/tpu: $chips}}
              volumeMounts: [{name: share, mountPath: /mnt/share}]
            volumes: [{name: share, persistentVolumeClaim: {claimName: $claim}}]
END
}

if [ "$dry" ]; then manifest; else manifest | kubectl apply -f -; fi
