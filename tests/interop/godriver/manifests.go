package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
)

// newManifestClient returns a clientset whose ResourceClaims are those in dir's manifests at the time
// of each request. Everything else of it is the empty fake.
func newManifestClient(dir string) kubernetes.Interface {
	client := fake.NewSimpleClientset()
	client.PrependReactor("get", "resourceclaims", func(action clienttesting.Action) (bool, runtime.Object, error) {
		get := action.(clienttesting.GetAction)
		// After "not found" the helper's client asks for the older API versions too. They hold
		// nothing, as they would be off in a current cluster.
		if action.GetResource().Version == resourceapi.SchemeGroupVersion.Version {
			claim, err := findClaim(dir, get.GetNamespace(), get.GetName())
			if err != nil {
				return true, nil, err
			}
			if claim != nil {
				return true, claim, nil
			}
		}
		return true, nil, apierrors.NewNotFound(resourceapi.Resource("resourceclaims"), get.GetName())
	})
	return client
}

// findClaim looks for a claim in all *.yaml, *.yml and *.json files of dir; nil when none has it.
// A file that cannot be read, which may be one that is just being written, hides only itself.
func findClaim(dir, namespace, name string) (*resourceapi.ResourceClaim, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	for _, entry := range entries {
		switch filepath.Ext(entry.Name()) {
		case ".yaml", ".yml", ".json":
		default:
			continue
		}
		claims, err := readClaims(filepath.Join(dir, entry.Name()))
		if err != nil {
			fmt.Fprintf(os.Stderr, "godriver: %v\n", err)
		}
		for _, claim := range claims {
			if claim.Namespace == namespace && claim.Name == name {
				return claim, nil
			}
		}
	}
	return nil, nil
}

// readClaims returns the ResourceClaims of one file, and on an error those before it.
func readClaims(path string) ([]*resourceapi.ResourceClaim, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	var claims []*resourceapi.ResourceClaim
	decoder := yaml.NewYAMLOrJSONDecoder(file, 4096)
	for {
		var document json.RawMessage
		if err := decoder.Decode(&document); errors.Is(err, io.EOF) {
			return claims, nil
		} else if err != nil {
			return claims, fmt.Errorf("%s: %w", path, err)
		}
		if len(document) == 0 {
			continue // Nothing between two separators.
		}
		var kind metav1.TypeMeta
		if err := json.Unmarshal(document, &kind); err != nil {
			return claims, fmt.Errorf("%s: %w", path, err)
		}
		if kind.Kind != "ResourceClaim" || kind.APIVersion != resourceapi.SchemeGroupVersion.String() {
			continue
		}
		claim := &resourceapi.ResourceClaim{}
		if err := json.Unmarshal(document, claim); err != nil {
			return claims, fmt.Errorf("%s: %w", path, err)
		}
		if claim.Namespace == "" {
			claim.Namespace = metav1.NamespaceDefault
		}
		claims = append(claims, claim)
	}
}
