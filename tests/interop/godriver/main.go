// Command godriver is a small DRA driver on the official kubelet plugin helper
// (k8s.io/dynamic-resource-allocation/kubeletplugin), for tests of everything that takes the
// kubelet's place: registration, gRPC over unix sockets, restarts and rolling updates are the
// helper's, so a peer that works with this program works with drivers in the field.
//
// It needs no cluster. The helper reads ResourceClaims through a fake clientset, which answers from
// a folder of manifests; the devices are imaginary, with one CDI spec file per prepared claim. The
// driver keeps no state of its own: that file is all there is, so an instance that was started later,
// or beside this one, can unprepare what this one prepared.
//
// On stdout it prints "ready" once both sockets accept calls, "registered" each time its peer confirms
// the registration, and "refused: <reason>" each time the peer declines it. "registered" can come
// before "ready". SIGTERM and SIGINT stop it cleanly: sockets removed, exit status 0.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
)

// settings are the command line.
type settings struct {
	driverName    string
	nodeName      string
	registryDir   string
	pluginDataDir string
	cdiDir        string
	manifests     string
	callLog       string
	podUID        string
	instance      string
	failPrepare   int
	delayPrepare  time.Duration
}

func parseFlags(args []string) (*settings, error) {
	s := &settings{}
	flags := flag.NewFlagSet("godriver", flag.ContinueOnError)
	flags.StringVar(&s.driverName, "driver-name", "gpu.example.com", "name of the DRA driver")
	flags.StringVar(&s.nodeName, "node-name", "node-1", "name of the node it pretends to run on")
	flags.StringVar(&s.registryDir, "registry-dir", "", "folder for the registration socket (required)")
	flags.StringVar(&s.pluginDataDir, "plugin-data-dir", "", "folder for the DRA socket (required)")
	flags.StringVar(&s.cdiDir, "cdi-dir", "", "folder for the CDI spec files (required)")
	flags.StringVar(&s.manifests, "manifests", "", "folder of ResourceClaim manifests, read at every prepare (required)")
	flags.StringVar(&s.callLog, "call-log", "", "file to append one JSON line to for each claim of each call; empty: no log")
	flags.StringVar(&s.podUID, "pod-uid", "", "UID of the driver's own pod; turns on rolling updates")
	flags.StringVar(&s.instance, "instance", "", "name of this process in the call log")
	flags.IntVar(&s.failPrepare, "fail-prepare", 0, "answer this many prepare calls with an error for each claim, before doing any work")
	flags.DurationVar(&s.delayPrepare, "delay-prepare", 0, "pause before each prepare; its effect comes even when the caller has given up")
	klogFlags := flag.NewFlagSet("", flag.ContinueOnError)
	klog.InitFlags(klogFlags)
	flags.Var(klogFlags.Lookup("v").Value, "v", "verbosity of the helper's log on stderr; 6 shows requests and answers")
	if err := flags.Parse(args); err != nil {
		return nil, err
	}
	if flags.NArg() > 0 {
		return nil, fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	for name, dir := range map[string]*string{
		"registry-dir":    &s.registryDir,
		"plugin-data-dir": &s.pluginDataDir,
		"cdi-dir":         &s.cdiDir,
		"manifests":       &s.manifests,
	} {
		if *dir == "" {
			return nil, fmt.Errorf("-%s is required", name)
		}
		// The peer connects to the path that the helper advertises, so it must not depend on
		// where this process was started.
		absolute, err := filepath.Abs(*dir)
		if err != nil {
			return nil, fmt.Errorf("-%s: %w", name, err)
		}
		*dir = absolute
		if err := os.MkdirAll(absolute, 0o750); err != nil {
			return nil, fmt.Errorf("-%s: %w", name, err)
		}
	}
	return s, nil
}

func run(args []string) error {
	s, err := parseFlags(args)
	if err != nil {
		return err
	}
	ctx, stopSignals := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stopSignals()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)

	calls, err := openCallLog(s.callLog, s.instance)
	if err != nil {
		return err
	}
	defer calls.close()

	helper, err := kubeletplugin.Start(ctx,
		&driver{
			name:         s.driverName,
			cdi:          cdiFolder{dir: s.cdiDir, driver: s.driverName},
			delayPrepare: s.delayPrepare,
			failuresLeft: s.failPrepare,
			fatal:        cancel,
		},
		kubeletplugin.DriverName(s.driverName),
		kubeletplugin.NodeName(s.nodeName),
		kubeletplugin.KubeClient(newManifestClient(s.manifests)),
		kubeletplugin.RegistrarDirectoryPath(s.registryDir),
		kubeletplugin.PluginDataDirectoryPath(s.pluginDataDir),
		kubeletplugin.RollingUpdate(types.UID(s.podUID)),
		kubeletplugin.GRPCInterceptor(announceRegistration),
		kubeletplugin.GRPCInterceptor(calls.interceptor),
	)
	if err != nil {
		return err
	}
	fmt.Println("ready")
	<-ctx.Done()
	helper.Stop()
	// A signal is the ordinary end; anything else was reported through HandleError.
	var fatal *fatalError
	if errors.As(context.Cause(ctx), &fatal) {
		return fatal
	}
	return nil
}

func main() {
	err := run(os.Args[1:])
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "godriver:", err)
		os.Exit(1)
	}
}
