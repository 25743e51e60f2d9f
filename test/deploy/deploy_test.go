// Package deploy checks the files of examples/deploy as far as that goes without a builder of images and without a cluster.
package deploy

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"
)

const (
	root   = "../.."
	folder = root + "/examples/deploy/"
)

func read(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(folder + name)
	require.NoError(t, err)
	return string(text)
}

// The image builds what there is, as the file says, and starts what it has built.
func TestContainerfile(t *testing.T) {
	out := t.TempDir()
	made := map[string]bool{}
	for line := range strings.Lines(read(t, "Containerfile")) {
		words := strings.Fields(line)
		switch {
		case len(words) == 0 || strings.HasPrefix(line, "#"):
		case words[0] == "COPY" && !strings.HasPrefix(words[1], "--from"):
			for _, name := range words[1 : len(words)-1] {
				_, err := os.Stat(filepath.Join(root, name))
				require.NoError(t, err, line)
			}
		case words[0] == "RUN" && strings.Contains(line, "go build"):
			m := regexp.MustCompile(`-o /out/(\w+) (\./\S+)$`).FindStringSubmatch(strings.TrimSpace(line))
			require.NotNil(t, m, line)
			made["/usr/local/bin/"+m[1]] = true
			if testing.Short() {
				continue
			}
			cmd := exec.Command("sh", "-c", strings.ReplaceAll(strings.TrimSpace(strings.TrimPrefix(line, "RUN")), "/out/", out+"/"))
			cmd.Dir = root
			text, err := cmd.CombinedOutput()
			require.NoError(t, err, "%s: %s", line, text)
		case words[0] == "ENTRYPOINT":
			require.True(t, made[strings.Trim(words[1], `["]`)], line)
		case words[0] == "FROM":
			require.Regexp(t, `^FROM (golang:1\.26-bookworm AS build|debian:bookworm-slim)$`, strings.TrimSpace(line), "the libraries of both are of one Debian")
		}
	}
	require.Len(t, made, 3)
	if testing.Short() {
		return
	}
	// What the image says that it can be run with.
	cmd := exec.Command(filepath.Join(out, "switchyard"), "run", "-n", "2", filepath.Join(out, "worker"))
	text, err := cmd.CombinedOutput()
	require.NoError(t, err, string(text))
	require.Contains(t, string(text), "rank 1 of 2")
}

// container is one of a pod, with the fields of Kubernetes' API that the files use.
type container struct {
	Name    string   `yaml:"name"`
	Image   string   `yaml:"image"`
	Command []string `yaml:"command"`
	Args    []string `yaml:"args"`
	Env     []struct {
		Name  string `yaml:"name"`
		Value string `yaml:"value"`
	} `yaml:"env"`
	VolumeMounts []struct {
		Name      string `yaml:"name"`
		MountPath string `yaml:"mountPath"`
	} `yaml:"volumeMounts"`
	Resources struct {
		Limits map[string]int `yaml:"limits"`
	} `yaml:"resources"`
}

// jobSpec is that of an indexed Job.
type jobSpec struct {
	BackoffLimit   *int   `yaml:"backoffLimit"`
	Completions    int    `yaml:"completions"`
	Parallelism    int    `yaml:"parallelism"`
	CompletionMode string `yaml:"completionMode"`
	Template       struct {
		Spec struct {
			RestartPolicy string `yaml:"restartPolicy"`
			Affinity      struct {
				PodAffinity struct {
					Required []struct {
						TopologyKey   string `yaml:"topologyKey"`
						LabelSelector struct {
							MatchLabels map[string]string `yaml:"matchLabels"`
						} `yaml:"labelSelector"`
					} `yaml:"requiredDuringSchedulingIgnoredDuringExecution"`
				} `yaml:"podAffinity"`
			} `yaml:"affinity"`
			Containers []container `yaml:"containers"`
			Volumes    []struct {
				Name     string `yaml:"name"`
				HostPath struct {
					Path string `yaml:"path"`
					Type string `yaml:"type"`
				} `yaml:"hostPath"`
			} `yaml:"volumes"`
		} `yaml:"spec"`
	} `yaml:"template"`
}

// jobSet has the fields of JobSet's API v1alpha2 and of Kubernetes' Jobs and pods that the file uses. Others are errors.
type jobSet struct {
	APIVersion string            `yaml:"apiVersion"`
	Kind       string            `yaml:"kind"`
	Metadata   map[string]string `yaml:"metadata"`
	Spec       struct {
		ReplicatedJobs []struct {
			Name     string `yaml:"name"`
			Replicas int    `yaml:"replicas"`
			Template struct {
				Spec jobSpec `yaml:"spec"`
			} `yaml:"template"`
		} `yaml:"replicatedJobs"`
	} `yaml:"spec"`
}

// podsJob is the Job of pods.yaml.
type podsJob struct {
	APIVersion string            `yaml:"apiVersion"`
	Kind       string            `yaml:"kind"`
	Metadata   map[string]string `yaml:"metadata"`
	Spec       jobSpec           `yaml:"spec"`
}

// decode reads a file into v, which has all fields that the file may have.
func decode(t *testing.T, name string, v any) {
	t.Helper()
	decoder := yaml.NewDecoder(bytes.NewBufferString(read(t, name)))
	decoder.KnownFields(true)
	require.NoError(t, decoder.Decode(v))
}

// podOfEachRank reads pods.yaml.
func podOfEachRank(t *testing.T) (job podsJob, env map[string]string) {
	t.Helper()
	decode(t, "pods.yaml", &job)
	env = map[string]string{}
	for _, v := range job.Spec.Template.Spec.Containers[0].Env {
		env[v.Name] = v.Value
	}
	return job, env
}

// Each pod is one rank on one host, and has the folder of the sockets.
func TestPods(t *testing.T) {
	job, env := podOfEachRank(t)
	spec, pod := job.Spec, job.Spec.Template.Spec
	require.Equal(t, []string{"batch/v1", "Job"}, []string{job.APIVersion, job.Kind})
	require.Equal(t, []any{"Indexed", "Never", spec.Completions}, []any{spec.CompletionMode, pod.RestartPolicy, spec.Parallelism})
	require.Equal(t, "kubernetes.io/hostname", pod.Affinity.PodAffinity.Required[0].TopologyKey)
	require.Equal(t, map[string]string{"batch.kubernetes.io/job-name": job.Metadata["name"]}, pod.Affinity.PodAffinity.Required[0].LabelSelector.MatchLabels)
	ranks := strconv.Itoa(spec.Completions)
	mount := pod.Containers[0].VolumeMounts[0]
	require.Equal(t, map[string]string{"SWITCHYARD_WORLD_SIZE": ranks, "SWITCHYARD_LOCAL_WORLD_SIZE": ranks, "SWITCHYARD_SOCKETS": mount.MountPath}, env)
	require.Equal(t, mount.Name, pod.Volumes[0].Name)
	require.Equal(t, "DirectoryOrCreate", pod.Volumes[0].HostPath.Type)
}

func TestJobSet(t *testing.T) {
	var set jobSet
	decode(t, "jobset.yaml", &set)
	require.Equal(t, []string{"jobset.x-k8s.io/v1alpha2", "JobSet"}, []string{set.APIVersion, set.Kind})
	require.Len(t, set.Spec.ReplicatedJobs, 1)
	job := set.Spec.ReplicatedJobs[0]
	spec := job.Template.Spec
	require.Equal(t, []any{1, 1, 1, "Indexed", "Never"}, []any{job.Replicas, spec.Completions, spec.Parallelism, spec.CompletionMode, spec.Template.Spec.RestartPolicy})
	container := spec.Template.Spec.Containers[0]
	require.Equal(t, []string{"run", "-n", "8", "worker"}, container.Args, "as many ranks as GPUs")
	require.Equal(t, map[string]int{"nvidia.com/gpu": 8}, container.Resources.Limits)
}

func TestScripts(t *testing.T) {
	out, err := exec.Command("bash", "-n", folder+"slurm.sh").CombinedOutput()
	require.NoError(t, err, string(out))
	require.Contains(t, read(t, "slurm.sh"), "\n#SBATCH --ntasks-per-node=8\n#SBATCH --gpus-per-node=8\n")
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("python3 is not installed")
	}
	out, err = exec.Command(python, "-c", "import ast, sys; ast.parse(open(sys.argv[1]).read())", folder+"ray_actors.py").CombinedOutput()
	require.NoError(t, err, string(out))
}
