package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	drapbv1 "k8s.io/kubelet/pkg/apis/dra/v1"
	drapbv1beta1 "k8s.io/kubelet/pkg/apis/dra/v1beta1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// callLog appends what the driver is asked for to a file, which other instances may append to as well.
type callLog struct {
	instance string
	mutex    sync.Mutex
	file     *os.File // nil: no log
}

// call is one line of the log: one claim of one call.
type call struct {
	Time      string `json:"time"`
	Method    string `json:"method"`
	ClaimUID  string `json:"claim_uid"`
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	Instance  string `json:"instance"`
}

// requestedClaim is what both versions of the DRA API say about a claim.
type requestedClaim interface {
	GetUid() string
	GetNamespace() string
	GetName() string
}

func openCallLog(name, instance string) (*callLog, error) {
	log := &callLog{instance: instance}
	if name == "" {
		return log, nil
	}
	file, err := os.OpenFile(name, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, fmt.Errorf("-call-log: %w", err)
	}
	log.file = file
	return log, nil
}

func (l *callLog) close() {
	if l.file != nil {
		_ = l.file.Close()
	}
}

// interceptor logs each prepare and unprepare before the helper sees it, so that calls which the
// helper itself fails are there too, and calls which got no answer.
func (l *callLog) interceptor(ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	if claims := requestedClaims(request); len(claims) > 0 && l.file != nil {
		if err := l.append(path.Base(info.FullMethod), claims); err != nil {
			return nil, status.Errorf(codes.Internal, "call log: %v", err)
		}
	}
	return handler(ctx, request)
}

func (l *callLog) append(method string, claims []requestedClaim) error {
	now := time.Now().UTC().Format(time.RFC3339Nano)
	var lines []byte
	for _, claim := range claims {
		line, err := json.Marshal(call{
			Time:      now,
			Method:    method,
			ClaimUID:  claim.GetUid(),
			Namespace: claim.GetNamespace(),
			Name:      claim.GetName(),
			Instance:  l.instance,
		})
		if err != nil {
			return err
		}
		lines = append(append(lines, line...), '\n')
	}
	l.mutex.Lock()
	defer l.mutex.Unlock()
	// One write, so that lines of two instances never mix.
	if _, err := l.file.Write(lines); err != nil {
		return err
	}
	return l.file.Sync()
}

// requestedClaims are the claims of a prepare or unprepare request; none for other requests.
func requestedClaims(request any) []requestedClaim {
	switch request := request.(type) {
	case interface{ GetClaims() []*drapbv1.Claim }:
		return asRequested(request.GetClaims())
	case interface{ GetClaims() []*drapbv1beta1.Claim }:
		return asRequested(request.GetClaims())
	}
	return nil
}

func asRequested[C requestedClaim](claims []C) []requestedClaim {
	requested := make([]requestedClaim, 0, len(claims))
	for _, claim := range claims {
		requested = append(requested, claim)
	}
	return requested
}

// announceRegistration prints what the peer decided. The helper's RegistrationStatus would have to be
// polled, is not safe to read meanwhile, and cannot tell a second confirmation from the first.
func announceRegistration(ctx context.Context, request any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	answer, err := handler(ctx, request)
	if decision, ok := request.(*registerapi.RegistrationStatus); ok {
		if decision.GetPluginRegistered() {
			fmt.Println("registered")
		} else {
			fmt.Println("refused:", decision.GetError())
		}
	}
	return answer, err
}
