{{- /* SPDX-License-Identifier: Apache-2.0 */ -}}
{{- /* What every object is called: of two releases in a namespace, each has its own. */ -}}
{{- define "openenvd.name" -}}
{{- $name := ternary .Release.Name (printf "%s-openenvd" .Release.Name) (contains "openenvd" .Release.Name) -}}
{{- $name | trunc 63 | trimSuffix "-" -}}
{{- end }}
{{- define "openenvd.labels" -}}
{app.kubernetes.io/name: openenvd, app.kubernetes.io/instance: {{ .Release.Name }}}
{{- end }}
