{{- define "pagedray.name" -}}
{{- if or (gt (len .Release.Name) 47) (not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" .Release.Name)) -}}
{{- fail (printf "The release name %q must be at most 47 lowercase letters, digits and dashes, and begin with a letter." .Release.Name) -}}
{{- end -}}
{{- .Release.Name -}}
{{- end -}}

{{- define "pagedray.isInS3" -}}
{{- if hasPrefix "s3://" .Values.model }}true{{ end -}}
{{- end -}}

{{- /* Whether a Job downloads the model. */ -}}
{{- define "pagedray.isDownloaded" -}}
{{- if not (hasPrefix "/" .Values.model) }}true{{ end -}}
{{- end -}}

{{- define "pagedray.isHub" -}}
{{- if and (include "pagedray.isDownloaded" .) (not (include "pagedray.isInS3" .)) }}true{{ end -}}
{{- end -}}

{{- define "pagedray.usesVolume" -}}
{{- if or (include "pagedray.isDownloaded" .) (eq .Values.model "/models") (hasPrefix "/models/" .Values.model) }}true{{ end -}}
{{- end -}}

{{- /* What replicas load: a Hub id, or a folder. */ -}}
{{- define "pagedray.model" -}}
{{- if include "pagedray.isInS3" . -}}
/models/s3/{{ trimPrefix "s3://" .Values.model }}
{{- else -}}
{{- .Values.model -}}
{{- end -}}
{{- end -}}

{{- /* `pagedray deploy fetch` for the model, with a flag. */ -}}
{{- define "pagedray.fetch" -}}
{{- $command := list "pagedray" "deploy" "fetch" -}}
{{- if .wait -}}{{- $command = append $command "--wait" -}}{{- end -}}
{{- if include "pagedray.isInS3" .root -}}
{{- $command = concat $command (list "--folder" (include "pagedray.model" .root)) -}}
{{- end -}}
{{- toJson (append $command .root.Values.model) -}}
{{- end -}}

{{- /* The volume at /models, read-only. */ -}}
{{- define "pagedray.modelVolume" -}}
- name: models
  {{- if .Values.storage.image }}
  image:
    reference: {{ .Values.storage.image }}
    pullPolicy: IfNotPresent
  {{- else }}
  persistentVolumeClaim:
    claimName: {{ include "pagedray.claim" . }}
    readOnly: true
  {{- end }}
{{- end -}}

{{- define "pagedray.claim" -}}
{{- .Values.storage.existingClaim | default (printf "%s-models" (include "pagedray.name" .)) -}}
{{- end -}}

{{- /* The mount of the volume at /models, which may be written. */ -}}
{{- define "pagedray.modelMount" -}}
- name: models
  mountPath: /models
  {{- with .Values.storage.subPath }}
  subPath: {{ . }}
  {{- end }}
{{- end -}}

{{- define "pagedray.keySecret" -}}
{{- .Values.keys.existingSecret | default (printf "%s-api-keys" (include "pagedray.name" .)) -}}
{{- end -}}

{{- define "pagedray.workerImage" -}}
{{- $device := ternary "cuda" "cpu" (gt (int .Values.gpusPerHost) 0) -}}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default (printf "%s-%s" .Chart.AppVersion $device)) -}}
{{- end -}}

{{- define "pagedray.headImage" -}}
{{- printf "%s:%s" .Values.image.repository .Values.image.headTag -}}
{{- end -}}

{{- /* The number of worker pods for a number of replicas. */ -}}
{{- define "pagedray.workers" -}}
{{- $ranks := mul .replicas .values.tensorParallelSize -}}
{{- $perHost := max (int .values.gpusPerHost) 1 -}}
{{- if eq (int .values.gpusPerHost) 0 -}}{{ .replicas }}
{{- else -}}{{ div (add $ranks $perHost -1) $perHost }}
{{- end -}}
{{- end -}}

{{- define "pagedray.maxReplicas" -}}
{{- max (int .Values.maxReplicas) (int .Values.replicas) -}}
{{- end -}}

{{- define "pagedray.autoscales" -}}
{{- if gt (int .Values.maxReplicas) 0 }}true{{ end -}}
{{- end -}}

{{- /* Seconds until Kubernetes kills a pod: preStop, the drain, Ray's drain, and a margin. */ -}}
{{- define "pagedray.graceSeconds" -}}
{{- .Values.graceSeconds | default (add .Values.drainSeconds 60) -}}
{{- end -}}

{{- /* The bytes of a size in Gi or Ti. */ -}}
{{- define "pagedray.bytes" -}}
{{- $power := ternary 1099511627776 1073741824 (hasSuffix "Ti" .) -}}
{{- mul (regexFind "^[0-9]+" .) $power -}}
{{- end -}}

{{- /* What the ranks of one replica may write to their disks, of which file systems use a part. */ -}}
{{- define "pagedray.diskCacheBytes" -}}
{{- $bytes := mul (div (include "pagedray.bytes" .Values.diskCache.size) 10) 9 -}}
{{- if eq (int .Values.gpusPerHost) 0 -}}{{ $bytes }}
{{- else -}}{{ div (mul $bytes .Values.tensorParallelSize) .Values.gpusPerHost }}
{{- end -}}
{{- end -}}

{{- /* Takes the root and a size, to which an emptyDir of the disk cache is added. */ -}}
{{- define "pagedray.ephemeralStorage" -}}
{{- $disk := .root.Values.diskCache -}}
{{- if and $disk.size (not $disk.storageClassName) -}}
{{ add (include "pagedray.bytes" .size) (include "pagedray.bytes" $disk.size) | quote }}
{{- else -}}{{ .size }}
{{- end -}}
{{- end -}}

{{- define "pagedray.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- /* On which nodes pods may run; takes the node selector and the tolerations. */ -}}
{{- define "pagedray.nodes" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "pagedray.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "pagedray.serveConfig" -}}
{{- $arguments := dict "model" (include "pagedray.model" .) "device" (ternary "cuda" "cpu" (gt (int .Values.gpusPerHost) 0)) -}}
{{- $_ := set $arguments "drain_timeout_s" (int .Values.drainSeconds) -}}
{{- $_ := set $arguments "api_keys" "/etc/pagedray/keys.toml" -}}
{{- if gt (int .Values.tensorParallelSize) 1 -}}
{{- $_ := set $arguments "tensor_parallel_size" (int .Values.tensorParallelSize) -}}
{{- end -}}
{{- if and (gt (int .Values.gpusPerHost) 0) (gt (int .Values.tensorParallelSize) (int .Values.gpusPerHost)) -}}
{{- $_ := set $arguments "placement_strategy" "PACK" -}}
{{- end -}}
{{- if .Values.diskCache.size -}}
{{- $_ := set $arguments "disk_cache_folder" "/var/cache/pagedray" -}}
{{- $_ := set $arguments "disk_cache_bytes" (include "pagedray.diskCacheBytes" . | int64) -}}
{{- end -}}
{{- range $name, $value := .Values.arguments -}}
{{- $_ := set $arguments $name $value -}}
{{- /* Helm reads numbers as floating-point ones, and would write large integers as 1e+06. */ -}}
{{- if kindIs "float64" $value -}}
{{- if eq $value (floor $value) -}}
{{- $_ := set $arguments $name (int64 $value) -}}
{{- end -}}
{{- end -}}
{{- end -}}
proxy_location: EveryNode
http_options:
  host: 0.0.0.0
  port: 8000
grpc_options:
  port: 9000
  grpc_servicer_functions:
    - cluster.serving.ray_serve.grpc_proxy.add_services
applications:
  - name: pagedray
    route_prefix: /
    import_path: pagedray:build_app
    args:
      {{- toYaml $arguments | nindent 6 }}
    deployments:
      # Unlike a change of args, another number keeps the replicas that run.
      - name: PagedRay
        {{- if include "pagedray.autoscales" . }}
        autoscaling_config:
          min_replicas: {{ int .Values.replicas }}
          max_replicas: {{ int .Values.maxReplicas }}
          policy:
            policy_function: cluster.serving.ray_serve.autoscaling:TokensPolicy
            policy_kwargs:
              target_kv_use: {{ get $arguments "target_kv_use" | default 0.7 }}
              target_tokens: {{ get $arguments "target_tokens" | default "null" }}
        {{- else }}
        num_replicas: {{ int .Values.replicas }}
        {{- end }}
{{- end -}}

{{- define "pagedray.environment" -}}
- name: RAY_worker_niceness
  value: "0"
- name: RAY_USAGE_STATS_ENABLED
  value: "0"
# Replicas log to the container's standard error, which the kubelet rotates.
- name: RAY_LOG_TO_STDERR
  value: "1"
# What Ray and Serve log to files: at most 128 MiB each.
- name: RAY_ROTATION_MAX_BYTES
  value: "33554432"
- name: RAY_ROTATION_BACKUP_COUNT
  value: "3"
# Routes by session or prompt, and continues calls of replicas that fail.
- name: RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH
  value: cluster.serving.ray_serve.http_proxy:middlewares
# A replica that hangs cannot end its calls, so do not wait for them.
- name: RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS
  value: "1"
# A proxy that has died is replaced after three checks.
- name: RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S
  value: "2"
# Serve's gRPC proxy receives messages of up to 2 GiB by default.
- name: RAY_SERVE_GRPC_MAX_MESSAGE_SIZE
  value: "67108864"
{{- if include "pagedray.isHub" . }}
# The Job downloads the model; pods only read it.
- name: HF_HOME
  value: /models/huggingface
- name: HF_HUB_OFFLINE
  value: "1"
{{- end }}
{{- end -}}

{{- define "pagedray.mounts" -}}
- name: tmp
  mountPath: /tmp
- name: ray-logs
  mountPath: /tmp/ray
- name: shared-mem
  mountPath: /dev/shm
- name: cache
  mountPath: /home/pagedray/.cache
- name: api-keys
  mountPath: /etc/pagedray
  readOnly: true
{{- if include "pagedray.usesVolume" . }}
{{ include "pagedray.modelMount" . }}
  readOnly: true
{{- end }}
{{- end -}}

{{- /* Takes the root and the size of /dev/shm. */ -}}
{{- define "pagedray.volumes" -}}
- name: tmp
  emptyDir:
    sizeLimit: 1Gi
# With KubeRay's names, so that it adds no second volume for these two.
- name: ray-logs
  emptyDir:
    sizeLimit: 4Gi
- name: shared-mem
  emptyDir:
    medium: Memory
    sizeLimit: {{ .sharedMemory }}
# Kernels for GPUs, compiled at first use.
- name: cache
  emptyDir:
    sizeLimit: 4Gi
- name: api-keys
  secret:
    secretName: {{ include "pagedray.keySecret" .root }}
    defaultMode: 0440
{{- if include "pagedray.usesVolume" .root }}
{{ include "pagedray.modelVolume" .root }}
{{- end }}
{{- end -}}

{{- /* Waits for the Job that downloads the model. Takes the root and the image. */ -}}
{{- define "pagedray.waitForModel" -}}
initContainers:
  - name: wait-for-model
    image: {{ .image }}
    imagePullPolicy: {{ .root.Values.image.pullPolicy }}
    command: {{ include "pagedray.fetch" (dict "root" .root "wait" true) }}
    {{- if include "pagedray.isHub" .root }}
    env:
      - name: HF_HOME
        value: /models/huggingface
      - name: HF_HUB_OFFLINE
        value: "1"
    {{- end }}
    securityContext:
      {{- include "pagedray.containerSecurity" .root | nindent 6 }}
    resources:
      requests:
        cpu: 100m
        memory: 512Mi
      limits:
        cpu: "1"
        memory: 512Mi
    volumeMounts:
      - name: tmp
        mountPath: /tmp
      {{- include "pagedray.modelMount" .root | nindent 6 }}
        readOnly: true
{{- end -}}

{{- define "pagedray.dns" -}}
- to:
    - namespaceSelector:
        matchLabels:
          kubernetes.io/metadata.name: kube-system
      podSelector:
        matchLabels:
          k8s-app: kube-dns
    # NodeLocal DNSCache: its address on the network of the host, and its pods under Cilium.
    - ipBlock:
        cidr: 169.254.20.10/32
    - namespaceSelector:
        matchLabels:
          kubernetes.io/metadata.name: kube-system
      podSelector:
        matchLabels:
          k8s-app: node-local-dns
  ports:
    - protocol: UDP
      port: 53
    - protocol: TCP
      port: 53
{{- end -}}

{{- /* Fails for values that each are valid, and cannot work together. */ -}}
{{- define "pagedray.check" -}}
{{- $ranks := int .Values.tensorParallelSize -}}
{{- $gpus := int .Values.gpusPerHost -}}
{{- /* `and` evaluates all of its operands before Go 1.18. */ -}}
{{- if gt $gpus 0 -}}
{{- if ne (mod (max $ranks $gpus) (min $ranks $gpus)) 0 -}}
{{- fail (printf "tensorParallelSize: %d ranks do not fill hosts of %d GPUs (gpusPerHost); one must be a multiple of the other." $ranks $gpus) -}}
{{- end -}}
{{- end -}}
{{- $grace := add .Values.drainSeconds 60 -}}
{{- if and (gt (int .Values.graceSeconds) 0) (lt (int .Values.graceSeconds) (int $grace)) -}}
{{- fail (printf "graceSeconds: %d would end a pod within drainSeconds, %d, and a minute for Ray; use at least %d, or a shorter drainSeconds." (int .Values.graceSeconds) (int .Values.drainSeconds) $grace) -}}
{{- end -}}
{{- if and (gt (int .Values.maxReplicas) 0) (lt (int .Values.maxReplicas) (int .Values.replicas)) -}}
{{- fail "maxReplicas: it must be 0, for a fixed number, or at least replicas." -}}
{{- end -}}
{{- if and (include "pagedray.isDownloaded" .) (eq .Values.storage.accessMode "ReadOnlyMany") -}}
{{- fail "storage.accessMode: a model cannot be downloaded into a ReadOnlyMany claim; use ReadWriteMany, or a folder under /models that is in the claim." -}}
{{- end -}}
{{- if .Values.storage.image -}}
{{- if .Values.storage.existingClaim -}}
{{- fail "storage.image: the model has two sources, an image and storage.existingClaim; remove one." -}}
{{- end -}}
{{- if .Values.storage.subPath -}}
{{- fail "storage.subPath: it is a folder of a claim; of storage.image, write the folder as model, such as /models/FOLDER." -}}
{{- end -}}
{{- if include "pagedray.isDownloaded" . -}}
{{- fail (printf "model: %q would be downloaded, but storage.image has the model; write the folder of the image, such as /models, or remove storage.image." .Values.model) -}}
{{- end -}}
{{- if not (include "pagedray.usesVolume" .) -}}
{{- fail (printf "model: %q is not in storage.image, which is at /models; write /models or a folder below." .Values.model) -}}
{{- end -}}
{{- else if eq .Values.model "/models" -}}
{{- fail "model: write a folder below /models, such as /models/Llama-3.1-8B-Instruct." -}}
{{- end -}}
{{- if and .Values.storage.existingClaim .Values.storage.storageClassName -}}
{{- fail "storage.storageClassName: it is for a claim that the chart creates, and storage.existingClaim names another; remove one." -}}
{{- end -}}
{{- if not (include "pagedray.usesVolume" .) -}}
{{- range list "existingClaim" "subPath" -}}
{{- if get $.Values.storage . -}}
{{- fail (printf "storage.%s: nothing would use it, as the model %q is in the image of the container; write a folder below /models, or remove it." . $.Values.model) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with .Values.diskCache -}}
{{- if .size -}}
{{- $perHost := $gpus | default $ranks -}}
{{- if lt (include "pagedray.bytes" .size | int64) (mul $perHost 1073741824) -}}
{{- fail (printf "diskCache.size: %s is not enough for the %d ranks of a host, which each have a file there; use at least %dGi." .size $perHost $perHost) -}}
{{- end -}}
{{- range $name, $off := dict "enable_prefix_cache" "false" "enable_cpu_prefix_cache" "false" "num_cpu_blocks" "0" -}}
{{- if eq (get $.Values.arguments $name | toString) $off -}}
{{- fail (printf "arguments.%s: with %s, nothing would be written to the disk of diskCache.size; remove one." $name $off) -}}
{{- end -}}
{{- end -}}
{{- else if .storageClassName -}}
{{- fail "diskCache.storageClassName: there is no disk without diskCache.size; set it, or remove this." -}}
{{- end -}}
{{- end -}}
{{- if eq .Values.upgrade.strategy "NewClusterWithIncrementalUpgrade" -}}
{{- if not (include "pagedray.autoscales" .) -}}
{{- fail "upgrade.strategy: an incremental upgrade needs the autoscaler; set maxReplicas." -}}
{{- end -}}
{{- if .Values.gateway.enabled -}}
{{- fail "upgrade.strategy: an incremental upgrade replaces the service that the routes use, and has none for gRPC; use NewCluster, or gateway.enabled: false." -}}
{{- end -}}
{{- if not .Values.upgrade.incremental.gatewayClassName -}}
{{- fail "upgrade.incremental.gatewayClassName: an incremental upgrade needs a GatewayClass." -}}
{{- end -}}
{{- with .Values.upgrade.incremental -}}
{{- if gt (int .stepSizePercent) (int .maxSurgePercent) -}}
{{- fail (printf "upgrade.incremental.stepSizePercent: KubeRay rejects %d, which is more than maxSurgePercent, %d." (int .stepSizePercent) (int .maxSurgePercent)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (eq .Values.gcs.faultTolerance "rocksdb") (not .Values.gcs.rocksdb.featureGateEnabled) -}}
{{- fail "gcs.faultTolerance: rocksdb needs KubeRay's feature gate GCSFaultToleranceEmbeddedStorage; enable it in the operator and set gcs.rocksdb.featureGateEnabled: true." -}}
{{- end -}}
{{- if and .Values.gateway.enabled (not .Values.gateway.name) -}}
{{- fail "gateway.name: it is required with gateway.enabled." -}}
{{- end -}}
{{- if and .Values.gateway.inferencePool.enabled (not .Values.gateway.enabled) -}}
{{- fail "gateway.inferencePool.enabled: it needs gateway.enabled: true, whose route leads to the pool." -}}
{{- end -}}
{{- end -}}
