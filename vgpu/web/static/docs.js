// The documentation page of the HTTP API: Swagger UI, from the files that were installed with it.
window.SwaggerUIBundle({
  url: "/api/openapi.json",
  dom_id: "#api",
  deepLinking: true,
  validatorUrl: null,
  defaultModelsExpandDepth: 0,
});
