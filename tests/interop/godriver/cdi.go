package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
)

// cdiVersion is old on purpose: every container runtime that reads CDI specs accepts it.
const cdiVersion = "0.5.0"

// cdiClass is the class part of the CDI kind; the vendor part is the driver's name.
const cdiClass = "gpu"

// cdiFolder keeps one CDI spec file per prepared claim, <driver>-<claim UID>.json.
type cdiFolder struct {
	dir    string
	driver string
}

type cdiSpec struct {
	Version string      `json:"cdiVersion"`
	Kind    string      `json:"kind"`
	Devices []cdiDevice `json:"devices"`
}

type cdiDevice struct {
	Name  string   `json:"name"`
	Edits cdiEdits `json:"containerEdits"`
}

type cdiEdits struct {
	Env []string `json:"env"`
}

func (c cdiFolder) kind() string { return c.driver + "/" + cdiClass }

// deviceID names a device of a claim. The claim's UID is part of it, so that a container runtime
// never takes a cached spec of an earlier claim for this one.
func (c cdiFolder) deviceID(uid types.UID, device string) string {
	return c.kind() + "=" + deviceName(uid, device)
}

func deviceName(uid types.UID, device string) string { return string(uid) + "-" + device }

// write puts the claim's spec in place with all devices, or leaves what was there. A claim without
// devices of this driver gets no spec: a spec must name at least one.
func (c cdiFolder) write(uid types.UID, devices []kubeletplugin.Device) error {
	target, err := c.path(uid)
	if err != nil || len(devices) == 0 {
		return err
	}
	spec := cdiSpec{Version: cdiVersion, Kind: c.kind()}
	for _, device := range devices {
		name := deviceName(uid, device.DeviceName)
		// Two requests can share a device; its name stands in the spec once.
		if slices.ContainsFunc(spec.Devices, func(known cdiDevice) bool { return known.Name == name }) {
			continue
		}
		spec.Devices = append(spec.Devices, cdiDevice{
			Name:  name,
			Edits: cdiEdits{Env: []string{envName(name) + "=" + device.PoolName + "/" + device.DeviceName}},
		})
	}
	text, err := json.MarshalIndent(spec, "", "  ")
	if err != nil {
		return err
	}
	// Runtimes watch the folder and read *.json: the file takes that name only when it is whole.
	temporary, err := os.CreateTemp(c.dir, ".godriver-")
	if err != nil {
		return err
	}
	_, err = temporary.Write(append(text, '\n'))
	err = errors.Join(err, temporary.Chmod(0o644), temporary.Close())
	if err == nil {
		err = os.Rename(temporary.Name(), target)
	}
	if err != nil {
		return errors.Join(err, os.Remove(temporary.Name()))
	}
	return nil
}

func (c cdiFolder) remove(uid types.UID) error {
	target, err := c.path(uid)
	if err != nil {
		return err
	}
	if err := os.Remove(target); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

func (c cdiFolder) path(uid types.UID) (string, error) {
	// The UID comes over the wire and becomes part of a path.
	if uid == "" || strings.ContainsRune(string(uid), filepath.Separator) {
		return "", fmt.Errorf("claim UID %q is not one", uid)
	}
	return filepath.Join(c.dir, c.driver+"-"+string(uid)+".json"), nil
}

// envName makes a variable's name of a device's: upper case, with everything else as "_".
func envName(device string) string {
	return "GPU_" + strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z':
			return r - 'a' + 'A'
		case r >= 'A' && r <= 'Z', r >= '0' && r <= '9':
			return r
		}
		return '_'
	}, device)
}
