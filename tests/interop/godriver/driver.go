package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
)

// driver is the part of a DRA driver that the helper leaves to its author.
type driver struct {
	name         string
	cdi          cdiFolder
	delayPrepare time.Duration
	fatal        context.CancelCauseFunc

	mutex        sync.Mutex
	failuresLeft int
}

var _ kubeletplugin.DRAPlugin = &driver{}

// fatalError is a background error of the helper that no retry mends.
type fatalError struct {
	message string
	err     error
}

func (e *fatalError) Error() string { return e.message + ": " + e.err.Error() }
func (e *fatalError) Unwrap() error { return e.err }

// PrepareResourceClaims writes a CDI spec for each claim and answers with one device per allocation
// result of this driver. Preparing a claim again replaces its spec by the same one.
func (d *driver) PrepareResourceClaims(_ context.Context, claims []*resourceapi.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	// Not cut short when the caller gives up: drivers that wait for hardware seldom are.
	time.Sleep(d.delayPrepare)
	fail := d.takeFailure()
	results := make(map[types.UID]kubeletplugin.PrepareResult, len(claims))
	for _, claim := range claims {
		if fail {
			results[claim.UID] = kubeletplugin.PrepareResult{Err: errors.New("failing as -fail-prepare demands")}
			continue
		}
		devices := d.devicesOf(claim)
		if err := d.cdi.write(claim.UID, devices); err != nil {
			results[claim.UID] = kubeletplugin.PrepareResult{Err: err}
			continue
		}
		results[claim.UID] = kubeletplugin.PrepareResult{Devices: devices}
	}
	return results, nil
}

// UnprepareResourceClaims removes the claims' CDI specs. A claim without one is already unprepared.
func (d *driver) UnprepareResourceClaims(_ context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	results := make(map[types.UID]error, len(claims))
	for _, claim := range claims {
		results[claim.UID] = d.cdi.remove(claim.UID)
	}
	return results, nil
}

// HandleError reports a background error, and ends the process when it is one that stays.
func (d *driver) HandleError(_ context.Context, err error, msg string) {
	fmt.Fprintf(os.Stderr, "godriver: %s: %v\n", msg, err)
	if !errors.Is(err, kubeletplugin.ErrRecoverable) {
		d.fatal(&fatalError{message: msg, err: err})
	}
}

// WatchHealthStatus declines, as most drivers do: the helper then answers UNIMPLEMENTED.
func (d *driver) WatchHealthStatus(context.Context, chan<- kubeletplugin.DeviceHealthReport) error {
	return kubeletplugin.ErrHealthNotSupported
}

// devicesOf turns the allocation results of this driver into prepared devices, in their order.
func (d *driver) devicesOf(claim *resourceapi.ResourceClaim) []kubeletplugin.Device {
	var devices []kubeletplugin.Device
	for _, result := range claim.Status.Allocation.Devices.Results {
		if result.Driver != d.name {
			continue
		}
		devices = append(devices, kubeletplugin.Device{
			Requests:     []string{result.Request},
			PoolName:     result.Pool,
			DeviceName:   result.Device,
			ShareID:      result.ShareID,
			CDIDeviceIDs: []string{d.cdi.deviceID(claim.UID, result.Device)},
		})
	}
	return devices
}

// takeFailure uses up one of the failures asked for on the command line.
func (d *driver) takeFailure() bool {
	d.mutex.Lock()
	defer d.mutex.Unlock()
	if d.failuresLeft <= 0 {
		return false
	}
	d.failuresLeft--
	return true
}
